"""A server that speaks Tinker's protocol. Programs written for the official `tinker` SDK train and sample with rl-actors.

routes.py has the HTTP routes, and server.py does the work of each route. `python -m controllers.serve` starts the server.
"""

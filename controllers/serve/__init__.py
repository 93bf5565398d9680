"""A server that speaks Tinker's protocol. Programs written for the official `tinker` SDK train and sample with our actors.

routes.py has the routes, and server.py does their work. `python -m controllers.serve` starts it.
"""

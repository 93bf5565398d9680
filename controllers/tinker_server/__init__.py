"""A server that speaks Tinker's protocol. Through this server, programs written for the official `tinker` SDK use rl-actors to train and sample.

routes.py has the HTTP routes, and server.py does the work of each route. `python -m controllers.tinker_server` starts the server.
"""

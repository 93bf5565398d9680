"""A server that speaks Tinker's protocol, so that programs of the official `tinker` SDK train and
sample with rl-actors.
"""

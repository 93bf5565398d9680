"""The loops, and everything around them that is no service: tasks, rewards, checkpoints, reports and their command line."""

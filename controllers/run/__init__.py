"""An open run: its config, its actors, checkpoints, colocation, survival and recovery."""

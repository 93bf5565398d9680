"""A service: a process with a trainer and a generator to which other programs attach."""

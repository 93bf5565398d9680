"""The program around a training loop: command line, checks, start, end and exit status."""

from controllers.program.launch import main

__all__ = ["main"]

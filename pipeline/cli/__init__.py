"""The command line: `train` and the other commands of `python -m pipeline`, one module each."""

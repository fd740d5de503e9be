"""The tasks as users of plain DDP write them, to be started by torchrun. Comments and docstrings do not count."""

"""The tasks as users of hpc_train write them. Comments and docstrings do not count."""

"""The tasks as users of Lightning write them. Comments and docstrings do not count."""

"""The tasks as users of Accelerate write them. Comments and docstrings do not count."""

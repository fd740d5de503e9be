"""A user's package. Its rows are read without it: importing the package imports torch."""

import torch  # noqa: F401

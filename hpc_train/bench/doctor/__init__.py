"""The checks of ``python -m hpc_train doctor``: a module per subject, a function per check."""

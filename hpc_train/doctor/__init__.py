"""What ``python -m hpc_train doctor`` looks at: a module for each subject, a function for each check."""

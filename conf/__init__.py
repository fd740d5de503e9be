"""The config groups; in a wheel this directory is the package hpc_train.conf."""

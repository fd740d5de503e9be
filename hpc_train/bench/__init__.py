"""The benchmarks of ``python -m hpc_train bench``: one module for each command, and the workers that measure."""

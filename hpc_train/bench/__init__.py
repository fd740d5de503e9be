"""The benchmarks of ``python -m hpc_train bench``: what each command prints, and the workers that measure."""

"""Seven tasks of a researcher, written for hpc_train, Lightning, Accelerate and plain DDP, with the same numbers."""

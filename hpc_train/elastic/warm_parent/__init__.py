"""The warm parent of a node's workers has imported torch, so that it forks a worker in milliseconds.

``head_start`` starts the import with the command, before the config is known; ``early_forkserver`` is the program that
it runs. ``imports`` imports the modules of a run. ``hpc_train.elastic.worker_process`` starts the warm parent and
asks it for workers.
"""

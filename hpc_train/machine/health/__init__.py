"""Checks the GPUs, the kernel log and the RDMA ports of a node. The package needs neither torch nor a config."""

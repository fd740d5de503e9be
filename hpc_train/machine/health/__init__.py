"""Checks the GPUs, kernel log and RDMA ports of one node. The package needs neither torch nor a config."""

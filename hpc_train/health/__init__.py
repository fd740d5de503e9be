"""Checks the health of the hardware of one node: GPUs, kernel log and RDMA ports. The package needs neither torch nor a config."""

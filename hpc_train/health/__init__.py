"""The health of the hardware of one node: GPUs, kernel log and RDMA ports. It needs neither torch nor a config."""

"""Discovers the network hardware of a node without privileges, matches GPUs to NICs, and derives NCCL variables."""

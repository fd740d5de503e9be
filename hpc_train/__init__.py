"""Hydra-composed, submitit-launched, fault-tolerant PyTorch training on Slurm clusters."""

__version__ = "0.1.0"

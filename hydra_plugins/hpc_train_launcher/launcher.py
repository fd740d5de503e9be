"""Defines the launcher here because Hydra only finds plugins under ``hydra_plugins``; the code is in ``hpc_train``."""

from hpc_train.launch import launcher


class HpcTrainLauncher(launcher.HpcTrainLauncher):
    """Submits jobs to Slurm or starts them on this machine."""

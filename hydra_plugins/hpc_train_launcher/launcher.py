"""Hydra takes a launcher only from a class defined under ``hydra_plugins``; the real one is in ``hpc_train``."""

from hpc_train.launch import launcher


class HpcTrainLauncher(launcher.HpcTrainLauncher):
    """Submits to Slurm or to this machine."""

"""Defines the sweeper here because Hydra only finds plugins under ``hydra_plugins``; the code is in ``hpc_train``."""

from hpc_train.launch import launcher


class HpcTrainSweeper(launcher.HpcTrainSweeper):
    """Expands the jobs of ``-m``."""

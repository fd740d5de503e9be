"""Hydra takes a sweeper only from a class defined under ``hydra_plugins``; the real one is in ``hpc_train``."""

from hpc_train.launch import launcher


class HpcTrainSweeper(launcher.HpcTrainSweeper):
    """The jobs of ``-m``."""

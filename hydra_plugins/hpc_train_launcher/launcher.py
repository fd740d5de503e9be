"""Hydra takes a launcher only from a class defined under ``hydra_plugins``; the real one is in ``hpc_train``."""

from hydra.core.config_store import ConfigStore

from hpc_train.launch import launcher

TARGET = "hydra_plugins.hpc_train_launcher.launcher.HpcTrainLauncher"


class HpcTrainLauncher(launcher.HpcTrainLauncher):
    """Submits to Slurm or to this machine."""


ConfigStore.instance().store(group="hydra/launcher", name="hpc_train", node={"_target_": TARGET}, provider="hpc_train")

"""Stores checkpoints as artifacts of W&B with the type model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from hpc_train.config.schema import WandbConfig
from hpc_train.report.registry.registry import CHECKPOINT, Model, Promoted, bad_reference
from hpc_train.telemetry.sinks.identity import Identity
from hpc_train.telemetry.sinks.wandb import Wandb

REFERENCE = re.compile(r"([^/:]+/)?[^/:]+/[^/:]+:[^/:]+")
NOT_IN_NAMES = re.compile(r"[^\w\-.]")


class WandbRegistry:
    """The artifacts of a W&B project. Each belongs to the W&B run of the training."""

    name: ClassVar[str] = "wandb"

    def __init__(self, settings: WandbConfig) -> None:
        self._settings = settings

    def promote(self, model: Model) -> Promoted:
        import wandb

        name = NOT_IN_NAMES.sub("-", model.name)
        artifact = wandb.Artifact(name, type="model", metadata=dict(model.about))
        artifact.add_dir(str(model.folder), name=CHECKPOINT)
        artifact.add_dir(str(model.notes))
        tracker = Wandb(self._settings, Identity.of(model.config, model.run))
        tracker.open()  # it holds the lock of the run, to which two processes must not send at once
        try:
            logged = tracker.log_artifact(artifact, model.aliases)
            tracker.finish()
        except BaseException:
            tracker.abandon()
            raise
        return Promoted(logged.version, f"wandb:{logged.entity}/{logged.project}/{logged.name}", tracker.url)

    def fetch(self, reference: str, to: Path) -> None:
        import wandb

        if REFERENCE.fullmatch(reference) is None:
            raise bad_reference(f"wandb:{reference}", "wandb:ENTITY/PROJECT/NAME:ALIAS")
        wandb.Api().artifact(reference, type="model").download(root=str(to))

"""The typed schema of a run: one dataclass per config group, read by OmegaConf as structured configs.

A misspelled key or a value of the wrong type fails when the config is composed. This package imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_train.config.schema.cluster import ClusterConfig, ContainerConfig, FabricConfig, PriceConfig
from hpc_train.config.schema.data import (
    CIFAR100DataConfig,
    CustomDataConfig,
    DataKeys,
    ImagesDataConfig,
    MixtureDataConfig,
    SFTDataConfig,
    ShardsDataConfig,
    StreamDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.config.schema.key import MISSING, group, key
from hpc_train.config.schema.model import (
    CustomModelConfig,
    GPTConfig,
    HFModelConfig,
    LoraConfig,
    ModelKeys,
    MoEConfig,
    ViTConfig,
)
from hpc_train.config.schema.operation import (
    CheckpointConfig,
    ElasticConfig,
    LaunchConfig,
    MlflowConfig,
    ProfileConfig,
    PrometheusConfig,
    RunConfig,
    TelemetryConfig,
    WandbConfig,
)
from hpc_train.config.schema.training import (
    BatchConfig,
    OptimConfig,
    PrecisionConfig,
    StrategyConfig,
    TargetConfig,
    TrainConfig,
    VerifyConfig,
)

__all__ = [
    "BatchConfig", "CIFAR100DataConfig", "CheckpointConfig", "ClusterConfig", "Config", "ContainerConfig",
    "CustomDataConfig", "CustomModelConfig", "DataConfig", "DataKeys", "ElasticConfig", "FabricConfig", "GPTConfig",
    "HFModelConfig", "ImagesDataConfig", "LaunchConfig", "LoraConfig", "MixtureDataConfig", "MoEConfig",
    "MlflowConfig", "ModelConfig", "ModelKeys", "OptimConfig", "PrecisionConfig", "PriceConfig", "ProfileConfig",
    "PrometheusConfig", "RunConfig", "SFTDataConfig", "ShardsDataConfig", "StrategyConfig", "StreamDataConfig",
    "SyntheticDataConfig", "TargetConfig", "TelemetryConfig", "TextDataConfig", "TokensDataConfig", "TrainConfig",
    "VerifyConfig", "ViTConfig", "WandbConfig",
]  # fmt: skip


@dataclass
class Config:
    """All settings of a run. ``model`` and ``data`` hold the dataclass that their key ``kind`` names.

    The values of ``metrics`` and ``hooks`` are ``TargetConfig``. Their schema is a table of any values, since Hydra
    adds keys only to such a table.
    """

    cluster: ClusterConfig = group(ClusterConfig)
    strategy: StrategyConfig = group(StrategyConfig)
    model: Any = MISSING
    data: Any = MISSING
    optim: OptimConfig = group(OptimConfig)
    precision: PrecisionConfig = group(PrecisionConfig)
    train: TrainConfig = group(TrainConfig)
    batch: BatchConfig = group(BatchConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    elastic: ElasticConfig = group(ElasticConfig)
    telemetry: TelemetryConfig = group(TelemetryConfig)
    launch: LaunchConfig = group(LaunchConfig)
    run: RunConfig = group(RunConfig)
    metrics: dict[str, Any] = key(
        {},
        "Metrics of evaluations by name, besides the loss. `+metrics=NAME` adds a built-in one, "
        "`+metrics.NAME._target_=package.module.Name` your own; `metrics.NAME.args` are its keyword arguments.",
    )
    hooks: dict[str, Any] = key(
        {},
        "Code that runs during training, by name. `+hooks=NAME` adds a built-in hook, "
        "`+hooks.NAME._target_=package.module.Name` your own; `hooks.NAME.args` are its keyword arguments.",
    )
    eval_sets: dict[str, Any] = key(
        {},
        "More evaluation sets by name. Each is the config of `data` with other values, as in "
        "`+eval_sets.code.path=/data/code`.",
    )


ModelConfig = ModelKeys
DataConfig = DataKeys

"""From the data's config to a dataset."""

from __future__ import annotations

from hpc_train.config.errors import ConfigError
from hpc_train.config.schema import (
    CIFAR100DataConfig,
    CustomDataConfig,
    DataConfig,
    ImagesDataConfig,
    ShardsDataConfig,
    SyntheticDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from hpc_train.data.cifar100 import CIFAR100Dataset
from hpc_train.data.custom import build_custom
from hpc_train.data.dataset import Dataset
from hpc_train.data.images import ImagesDataset
from hpc_train.data.packing import PackedDataset
from hpc_train.data.shards import ShardsDataset
from hpc_train.data.split import SPLITS
from hpc_train.data.synthetic import SyntheticDataset
from hpc_train.data.text import TextDataset
from hpc_train.data.tokens import TokensDataset


def build_dataset(config: DataConfig, split: str, seed: int) -> Dataset:
    """The ``train`` or ``validation`` split that ``config`` describes.

    Args:
        seed: of augmentations and synthetic samples; the order of samples is not the dataset's matter.

    Raises:
        ConfigError: the input is missing, empty, damaged or does not fit the config.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, not one of {SPLITS}")
    match config:
        case TextDataConfig() | TokensDataConfig():
            return _text(config, split)
        case CIFAR100DataConfig() | ImagesDataConfig() | ShardsDataConfig():
            return _pictures(config, split, seed)
        case SyntheticDataConfig():
            return SyntheticDataset(config, split, seed)
        case CustomDataConfig():
            return build_custom(config, split)
    raise ConfigError(
        f"unknown kind of data {type(config).__name__}", where="data.kind", mend="data=text, or another of conf/data/"
    )


def _text(config: TextDataConfig | TokensDataConfig, split: str) -> Dataset:
    documents = TextDataset(config, split) if isinstance(config, TextDataConfig) else TokensDataset(config, split)
    return PackedDataset(documents, config.sequence_length) if config.packing else documents


def _pictures(config: CIFAR100DataConfig | ImagesDataConfig | ShardsDataConfig, split: str, seed: int) -> Dataset:
    if isinstance(config, CIFAR100DataConfig):
        return CIFAR100Dataset(config, split, seed)
    return (
        ImagesDataset(config, split, seed)
        if isinstance(config, ImagesDataConfig)
        else ShardsDataset(config, split, seed)
    )

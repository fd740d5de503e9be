"""Reads the YAML files of config groups for Hydra, and replaces renamed keys in them with their current names."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from hpc_train.config.removed import apply_new_names, tell_new_name
from hpc_train.config.run_path import relative


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's source of files; it has the same name, because the registry accepts no other one for ``file://``."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the content of a file with the current names of all keys; prints a notice for each renamed key."""
        result = super().load_config(config_path)
        values: Any = OmegaConf.to_container(result.config, resolve=False)
        if not isinstance(values, dict):
            return result
        package = result.header.get("package") or ".".join(PurePosixPath(config_path).parent.parts)
        renamed = list(apply_new_names(values, "" if package == "_global_" else package))
        if renamed:
            result.config = OmegaConf.create(values)
            for earlier in renamed:
                tell_new_name(earlier, relative(Path(self.path, config_path).with_suffix(".yaml")))
        return result


def register_file_source() -> None:
    Plugins.instance()  # registers Hydra's own
    SourcesRegistry.instance().types["file"] = FileConfigSource

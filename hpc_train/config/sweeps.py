"""The configs of many jobs: each combination of groups is composed once, values are merged into a copy.

Composing takes some 70 ms and a sweep mostly varies values, so a thousand jobs need not take a minute. The result is
Hydra's own: it applies value overrides after all groups, and interpolations are not resolved before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclass
class JobComposer:
    """Composes jobs by their overrides.

    Args:
        compose: composes one job the slow way.
        is_group: whether a key is a config group of the search path.
    """

    compose: Callable[[list[str]], DictConfig]
    is_group: Callable[[str], bool]
    _composed: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)
    _groups: dict[str, bool] = field(default_factory=dict)  # Hydra takes as long to tell as to compose half a job

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The composed config of one job.

        Raises:
            hydra.errors.HydraException, OmegaConfBaseException: an unknown group, option or key, or a wrong type.
        """
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        groups = [override for override in parsed if self._is_group(override) or _is_hydra(override)]
        values = [override for override in parsed if override not in groups]
        if any(override.is_add() or override.is_force_add() or override.is_delete() for override in values):
            return self.compose(list(overrides))  # these may add what others then set: their order counts
        key = tuple(override.input_line or "" for override in groups)
        if key not in self._composed:
            self._composed[key] = self.compose(list(key))
        config = self._composed[key].copy()
        try:
            for override in values:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self.compose(list(overrides))  # Hydra's own words for what is wrong
        return config

    def _is_group(self, override: Override) -> bool:
        key = override.key_or_group
        if key not in self._groups:
            self._groups[key] = self.is_group(key)
        return self._groups[key]


def _is_hydra(override: Override) -> bool:
    return override.key_or_group.startswith("hydra.")

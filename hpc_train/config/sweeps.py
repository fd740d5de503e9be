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
    """Composes jobs by their overrides; ``compose`` composes one job the slow way."""

    compose: Callable[[list[str]], DictConfig]
    _composed: dict[tuple[str, ...], DictConfig] = field(default_factory=dict)

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """The composed config of one job.

        Raises:
            hydra.errors.HydraException, OmegaConfBaseException: an unknown group, option or key, or a wrong type.
        """
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        choices = [override for override in parsed if _is_choice(override)]
        values = [override for override in parsed if not _is_choice(override)]
        if not all(_is_plain(override) for override in values):
            return self.compose(list(overrides))
        key = tuple(override.input_line or "" for override in choices)
        if key not in self._composed:
            self._composed[key] = self.compose(list(key))
        config = self._composed[key].copy()
        try:
            for override in values:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:
            return self.compose(list(overrides))  # Hydra's own words for what is wrong
        return config


def _is_choice(override: Override) -> bool:
    """``group=option``, and Hydra's own settings: what only Hydra can compose."""
    key = override.key_or_group
    return key.startswith("hydra.") or ("." not in key and not isinstance(override.value(), dict))


def _is_plain(override: Override) -> bool:
    """``key=value`` for a key below a group. Others may add or replace what the next one sets: their order counts."""
    changes = not (override.is_add() or override.is_force_add() or override.is_delete())
    return changes and "." in override.key_or_group

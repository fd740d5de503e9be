"""Names of earlier versions, in programs and configs of users."""

from __future__ import annotations

import importlib

import pytest

from hpc_train.config.compose import typed
from hpc_train.config.schema import TargetConfig
from tests.config.composing import compose


@pytest.mark.parametrize(
    ("earlier", "module"),
    [
        ("hpc_train.plan.orders", "hpc_train.layout.orders"),
        ("hpc_train.plan.techniques", "hpc_train.layout.techniques"),
        ("hpc_train.plan.validate", "hpc_train.layout.validate"),
        ("hpc_train.health.health_check", "hpc_train.machine.health.health_check"),
    ],
)
def test_a_module_of_an_earlier_version_is_the_new_one(earlier: str, module: str) -> None:
    assert importlib.import_module(earlier) is importlib.import_module(module)


def test_public_names_are_the_classes_that_are_used() -> None:
    for package, place, name in (
        ("hooks", "hooks", "Hook"),
        ("metrics", "metrics", "Metric"),
        ("loop", "custom_loop", "Context"),
    ):
        public = importlib.import_module(f"hpc_train.{package}")
        assert getattr(public, name) is getattr(importlib.import_module(f"hpc_train.train.{place}"), name)


def test_targets_of_earlier_versions_are_read_as_the_new_ones() -> None:
    earlier = ["+hooks=ema", "hooks.ema._target_=hpc_train.hooks.ema.EMA", "+metrics=accuracy"]
    config = typed(compose([*earlier, "metrics.accuracy._target_=hpc_train.metrics.ready.Accuracy"]))
    new = typed(compose(["+hooks=ema", "+metrics=accuracy"]))
    assert isinstance(config.hooks["ema"], TargetConfig)
    assert config.hooks == new.hooks
    assert config.metrics == new.metrics
    others = typed(compose(["+hooks=ema", "hooks.ema._target_=my_hpc_train.hooks.ema.EMA"]))
    assert others.hooks["ema"]._target_ == "my_hpc_train.hooks.ema.EMA"

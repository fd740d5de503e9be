"""The short way by which the jobs of a sweep are converted gives what the long way gives, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hpc_train.config import jobs
from hpc_train.config.arguments import expand, with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.config.compose import typed
from hpc_train.config.jobs import JobConfigs
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.run.freeze import text_of

SWEEPS = {  # overrides, and how many of the jobs take the short way
    "strategies and floats": ("+strategy=dp,hybrid optim.lr=1,2e-4 optim.weight_decay=0,0.1", 6),
    "groups": ("+strategy=dp model=gpt_tiny,gpt_124m train.steps=10,20 optim.betas=[0.9,0.95],[0.9,0.99]", 4),
    "interpolations": ("+strategy=dp data.vocab_size=100,200 train.epochs=1,2 data.sequence_length=64,32", 7),
    "nested": ("+strategy=dp checkpoint.every=0,10m telemetry.wandb.mode=offline,disabled train.debug=true,false", 7),
    "text and null": ("+strategy=dp cluster.partition=null,a,'null' cluster.account='1','a:b'", 5),
    "added keys": ("+strategy=dp +cluster.env.A=1,2 optim.lr=1,2", 2),
    "wrong type": ("+strategy=dp optim.lr=1,2,abc,3", 2),
    "wrong samples": ("+strategy=dp model=vit_tiny data=synthetic data.task=images,tokens data.image_size=32,64", 1),
    "paths": ("+strategy=dp data=text data.path=a,b", 1),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_the_short_way_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, expected = SWEEPS[name]
    line = CommandLine.parse(with_right_plus(words.split()))
    short: list[Config] = []
    convert = jobs._Kind.config

    def counted(kind: Any, values: dict[str, Any]) -> Config:
        short.append(convert(kind, values))
        return short[-1]

    monkeypatch.setattr(jobs._Kind, "config", counted)
    with line.composer() as compose:
        config_of = JobConfigs(compose)
        for overrides in expand(line.overrides):
            texts = [_text(config_of, overrides), _text(lambda each: typed(compose(each)), overrides)]
            assert texts[0] == texts[1], overrides
    assert len(short) == expected


def _text(config_of: Callable[[Sequence[str]], Config], overrides: Sequence[str]) -> str:
    try:
        return text_of(config_of(overrides))
    except Exception as error:  # also Hydra's
        return f"{type(error).__name__}: {error}"


def test_a_secret_among_the_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_TOKEN", "abcdefgh12")
    line = CommandLine.parse(with_right_plus(["+strategy=dp"]))
    with line.composer() as compose:
        config_of = JobConfigs(compose)
        for account in ("a", "b"):
            assert config_of([*line.overrides, f"cluster.account={account}"]).cluster.account == account
        with pytest.raises(UserError, match="secret SITE_TOKEN"):
            config_of([*line.overrides, "cluster.account=abcdefgh12"])

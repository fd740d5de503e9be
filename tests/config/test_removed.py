"""Keys of earlier versions: what a config that sets them is told, and how a run that was frozen with them is read."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_train.config.arguments import with_right_plus
from hpc_train.config.compose import typed
from hpc_train.config.removed import REMOVED, REMOVED_VALUES, RENAMED, replacement_of, without_removed
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import keys
from hpc_train.config.translate import translate
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze, load
from tests.config.composing import compose, config_of

OVERRIDES = [f"{sign}{key}" for key in sorted(REMOVED) for sign in ("", "+")]


@pytest.mark.long_form(1, cases=OVERRIDES[2:])  # they differ in the table only
@pytest.mark.parametrize("override", OVERRIDES)
def test_a_removed_key_is_refused_with_its_replacement(override: str) -> None:
    key = override.removeprefix("+")
    with pytest.raises(Exception, match=re.escape(key.rpartition(".")[2])) as raised:
        typed(compose([f"{override}=1"]))
    error = raised.value if isinstance(raised.value, UserError) else translate(raised.value)
    assert error is not None and error.where == key and error.fix == REMOVED[key].fix
    assert "no longer exists" in error.what


def test_no_removed_key_exists() -> None:
    assert not (REMOVED.keys() | RENAMED.keys()) & {name for name, _, _ in keys(Config())}


def test_a_key_of_a_removed_table_has_the_replacement_of_the_table() -> None:
    key, removed = next(iter(REMOVED.items()))
    assert replacement_of(f"{key}.name") == removed.fix
    assert replacement_of(key.rpartition(".")[0]) is None


def frozen_with(folder: Path, values: dict[str, Any]) -> RunDirectory:
    """Freezes a run as a version would that has the keys of ``values``."""
    config = config_of(f"run.root={folder}", "run.name=run")
    run = RunDirectory(folder / "run")
    freeze(config, run)
    frozen = yaml.safe_load(run.config.read_text())
    for key, value in values.items():
        *groups, name = key.split(".")
        node = frozen
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    text = yaml.safe_dump(frozen, sort_keys=False)
    run.config.write_text(text)
    run.update_record(config_hash=sha256(text.encode()).hexdigest())
    return run


def test_a_run_of_an_earlier_version_is_read_without_the_removed_keys(tmp_path: Path) -> None:
    values = {key: 1 if removed.same is None else removed.same[0] for key, removed in REMOVED.items()}
    run = frozen_with(tmp_path, values)
    config = load(run)
    assert config == config_of(f"run.root={tmp_path}", "run.name=run")
    freeze(config, run)
    assert not any(run.path.glob("events/*")), "no setting has changed"


def test_renamed_keys_of_a_frozen_run_have_their_new_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = frozen_with(tmp_path, {"cluster.mail_type": "END,FAIL", "cluster.nice": 10, "cluster.licenses": None})
    assert load(run).cluster.extra == {"mail-type": "END,FAIL", "nice": 10}
    assert capsys.readouterr().err == ""


def test_a_renamed_key_is_read_with_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = with_right_plus(["cluster=slurm", *(f"{sign}cluster.mail_type=END,FAIL" for sign in ("", "+"))])
    assert typed(compose(words)).cluster.extra == {"mail-type": "END,FAIL"}
    assert capsys.readouterr().err.startswith(
        "note: the command line: cluster.mail_type was renamed to cluster.extra.mail-type; the old name will not work"
    )
    for place, text in (
        ("cluster/nested.yaml", "defaults: [slurm, _self_]\nnice: 3\nextra: {hint: nomultithread}\n"),
        ("cluster/whole.yaml", "# @package _global_\ndefaults: [slurm@cluster, _self_]\ncluster: {nice: 3}\n"),
    ):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        found = typed(compose([f"hydra.searchpath=[file://{tmp_path}]", f"cluster={file.stem}"]))
        assert found.cluster.extra["nice"] == 3
        assert f"{file}: cluster.nice was renamed to cluster.extra.nice" in capsys.readouterr().err


CHANGING = sorted(key for key, removed in REMOVED.items() if removed.same is not None)


@pytest.mark.parametrize("key", CHANGING)
def test_a_removed_key_that_changed_the_computation_is_refused(key: str) -> None:
    config: dict[str, Any] = {}
    node = config
    *groups, name = key.split(".")
    for group in groups:
        node = node.setdefault(group, {})
    node[name] = "another"
    with pytest.raises(UserError, match=f"frozen with {re.escape(key)}=another"):
        without_removed(config, {})


@pytest.mark.parametrize(("key", "value"), sorted(REMOVED_VALUES))
def test_a_removed_value_is_refused_with_its_replacement(key: str, value: str) -> None:
    with pytest.raises(Exception, match=re.escape(value)) as raised:
        validate(config_of("+strategy=dp", f"{key}={value}"), 1, 2)
    error = raised.value if isinstance(raised.value, UserError) else translate(raised.value)
    assert error is not None and error.where == key and error.fix == REMOVED_VALUES[key, value].fix


def test_a_run_that_was_frozen_with_a_removed_value_has_what_its_record_says(tmp_path: Path) -> None:
    run = frozen_with(tmp_path, dict(REMOVED_VALUES.keys()))
    assert (load(run).strategy.bucket_cap_mb, load(run).strategy.compression) == (25.0, "none")
    assert load(run).optim.moments == "bf16"
    run.update_record(bucket_cap={"layout": "dp 2", "cap_mb": 5.0}, compression={"technique": "topk"})
    assert (load(run).strategy.bucket_cap_mb, load(run).strategy.compression) == (5.0, "topk")

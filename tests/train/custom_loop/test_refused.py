"""What cannot apply to code of one's own is refused or told before anything is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.api import _own_code
from hpc_train.config.arguments import override_value
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.run.freeze import check_identity
from hpc_train.run.snapshot import snapshot_code
from tests.config.composing import compose, config_of
from tests.train.custom_loop.functions import trains
from tests.train.custom_loop.test_command import git

ENTRY = "run.entry=tests.train.custom_loop.functions:trains"
SCRIPT = f"run.command=[python,{Path(__file__).with_name('script.py')}]"


@pytest.mark.parametrize(
    ("overrides", "where", "words"),
    [
        ([ENTRY, SCRIPT], "run.entry, run.command", "both set"),
        (["+run.args.x=1"], "run.args", "without run.entry"),
        (["run.progress_dir=x"], "run.progress_dir", "without run.command"),
        (
            ["run.entry=tests.train.custom_loop.nothing:main"],
            "run.entry",
            "there is no module tests.train.custom_loop.nothing",
        ),
        (["run.entry=tests.train.custom_loop.functions:nothing"], "run.entry", "defines no nothing"),
        (["run.entry=tests.train.custom_loop.functions:update"], "functions.py", "update requires adam, schedule, sgd"),
        (["run.command=[]"], "run.command", "not a program"),
        (["run.command=[python,no_such.py]"], "run.command", "no_such.py, which does not exist"),
        (["run.command=no_such_program"], "run.command", "not an executable"),
        (['run.command="python \'x"'], "run.command", "cannot be split"),
        ([ENTRY, "train.compile=true"], "train.compile", "has no effect with run.entry"),
        (
            [ENTRY, "strategy.compression=powersgd", "train.debug=true"],
            "strategy.compression, train.debug",
            "no effect",
        ),
        ([SCRIPT, "optim.lr=1", "checkpoint.keep=3"], "optim.lr, checkpoint.keep", "no effect with run.command"),
        ([SCRIPT, "strategy.tp=2"], "strategy.pp, strategy.cp, strategy.tp", "gets no mesh"),
        ([ENTRY, "strategy.pp=auto"], "strategy.pp", "depends on a model"),
    ],
)
def test_what_has_no_effect_is_refused(overrides: list[str], where: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        validate(config_of("+strategy=dp", *overrides), 1, 4)
    assert where in error.value.where


def test_what_only_the_code_itself_reads_is_told() -> None:
    entry = validate(config_of("+strategy=hsdp", ENTRY, "optim.lr=1"), 2, 4)
    assert "model, data, optim" in entry.notes[0]
    assert (entry.dp, entry.shard, entry.world_size, str(entry)) == (8, 4, 8, "dp 8 x pp 1 x tp 1 (custom code)")
    script = validate(config_of("+strategy=dp", SCRIPT), 1, 4)
    assert "the script saves and loads its own checkpoints" in script.notes[0]
    assert "hang detection is off" in script.notes[1]
    watched = validate(config_of("+strategy=dp", SCRIPT, "run.progress_dir=x"), 1, 4)
    assert len(watched.notes) == 1


def test_a_run_does_not_change_what_runs_in_it() -> None:
    before = config_of(ENTRY, "+run.args.lr=1", "run.name=x")
    check_identity(before, config_of(ENTRY, "+run.args.lr=2", "run.name=x"))
    with pytest.raises(UserError, match=r"run\.entry: tests\.train\.custom_loop\.functions:trains -> None"):
        check_identity(before, config_of(SCRIPT, "run.name=x"))


def test_a_script_that_git_ignores_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "--quiet")
    (tmp_path / ".gitignore").write_text("train.py\n")
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"train\.py is ignored by git") as error:
        snapshot_code([config_of("run.command=[python,train.py]")], tmp_path / "code")
    assert error.value.where == "run.command"


VALUES = {"text": "it's {a} \\", "list": [1, 2.5, "x,y"], "none": None, "flag": True, "nested": {"a": [1], "b": "c d"}}


def test_arguments_of_submit_arrive_as_they_were() -> None:
    node = compose(_own_code(trains, VALUES))
    assert node.run.entry == "tests.train.custom_loop.functions:trains"
    assert node.run.args == VALUES
    with pytest.raises(UserError, match="cannot be in a config"):
        override_value(object())
    with pytest.raises(UserError, match="workers cannot import"):
        _own_code(lambda context: None, {})

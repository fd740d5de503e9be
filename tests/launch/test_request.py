"""All doors to a run take one path: each refuses and notes the same, in the same words.

A refusal of the check is driven through every door that can meet it, in this process, without starting a worker.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import pytest

from hpc_train import api, cli
from hpc_train.bench.doctor.job import check_slurm_and_job, composed
from hpc_train.bench.measuring import check_here, config_of
from hpc_train.errors import UserError
from hpc_train.machine.health.finding import OK
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from tests.config.composing import config_of as config_with
from tests.config.composing import forget_compositions
from tests.doors.command import environment
from tests.schedulers.test_variables import command as write_command

CPUS = ["cluster.gpus_per_node=0", "cluster.cpu_workers=2"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory on a machine without Slurm and GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    with mock.patch.dict(os.environ, environment(PATH=f"{tmp_path}/bin"), clear=True):
        yield tmp_path


@pytest.fixture(scope="module", autouse=True)
def composed_once() -> Iterator[None]:
    """Keeps what Hydra's compose API returns, which takes most of the time of a command that is refused."""
    compose, kept = hydra.compose, dict[tuple[str, ...], bytes]()

    def remembered(name: str, overrides: list[str], **options: Any) -> Any:
        key = (name, *overrides, *map(str, options.items()))
        if key not in kept:
            kept[key] = pickle.dumps(compose(name, overrides, **options))
        return pickle.loads(kept[key])

    with mock.patch.object(hydra, "compose", remembered):
        yield


@dataclass(frozen=True)
class Answer:
    """What a door says: the refusal, or the notices about keys without an effect."""

    refusal: str
    notices: tuple[str, ...] = ()


Door = Callable[[list[str], pytest.CaptureFixture[str]], Answer]


def by_command(*words: str, command: str | None = None) -> Door:
    """Returns a door that calls the command line."""

    def open_door(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
        given = [*([] if command is None else [command]), *arguments, *words]
        with mock.patch("hpc_train.launch.executors.allocation.run_in_foreground", return_value=0):
            try:
                code: object = cli.run(given)
            except SystemExit as end:
                code = end.code or 0
        output = capsys.readouterr()
        text = output.out + output.err
        notices = tuple(line for line in text.splitlines() if " no effect " in line)
        if code == 0:
            return Answer("", notices)
        assert code == 2, text
        return Answer(_refusal(text), notices)

    return open_door


def _refusal(text: str) -> str:
    """Returns the message of a refusal without what a dry run prints around it."""
    lines = [line for line in text.splitlines() if not line.startswith(("job 0", "verdict:", "dry run:", "note:"))]
    return "\n".join(lines).strip().removeprefix("refused: ")


def by_api(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    try:
        with mock.patch("hpc_train.launch.submission.JobQueue.submit_all"):
            api.submit(arguments, verbose=True)
    except UserError as error:
        return Answer(str(error))
    output = capsys.readouterr()
    return Answer("", tuple(line for line in output.out.splitlines() if " no effect " in line))


def by_doctor(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    try:
        findings = [*check_slurm_and_job(composed(arguments), submits=True)]
    except UserError as error:  # a value that is wrong on any machine
        return Answer(str(error))
    (job,) = [finding for finding in findings if finding.subject == "job"]
    return Answer("" if job.level == OK else f"{job.text}\n{job.fix}")


def by_bench(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Answer:
    try:
        check_here(config_of(arguments))
    except UserError as error:
        return Answer(str(error))
    return Answer("")


DOORS: dict[str, Door] = {
    "-m": by_command("-m", "launch.dry_run=true"),
    "foreground": by_command(),
    "freeze": by_command(command="freeze"),
    "script": by_command(command="script"),
    "api": by_api,
}
GRAPHS = ["train.compile=true", "train.cuda_graphs=true", *CPUS]
V100 = ["precision.fp8=rowwise", "precision=bf16", "cluster.gpus_per_node=1", "cluster.gpu_type=v100"]
# The mistakes of one case do not depend on each other, so one message reports them all.
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "values, the compiler, and a run with other values": (
        ["optim.lr=-1", "train.steps=0", *GRAPHS, "run.name=other"],
        ["optim.lr is -1.0", "train.steps is 0", "train.cuda_graphs needs GPUs", "run.fork="],
    ),
    "most nodes, an input, and fp8 of a type of GPUs": (
        ["+strategy=pp", "strategy.pp=4", "data.path=nope", *V100],
        ["4 pipeline ranks need more than", "nope does not exist", "(v100) has compute capability 7.0"],
    ),
    "two techniques": (["train.loss_chunks=99999", *CPUS], ["train.loss_chunks"]),
    "the shape": (["elastic.min_nodes=3", *CPUS], ["elastic.min_nodes is 3, but cluster.nodes allows"]),
    "no choice of strategy=auto": (
        ["+strategy=auto", "run.entry=os:getcwd", *CPUS],
        ["strategy=auto cannot choose a layout"],
    ),
}


@pytest.mark.long_form(  # the first two show that every door calls the whole check
    5, cases=["two techniques", "the shape", "no choice of strategy=auto"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_every_door_refuses_alike(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected = REFUSED[name]
    monkeypatch.setattr("hpc_train.machine.allocation.gpus_to_use", lambda asked: asked)
    run = RunDirectory(place / "outputs" / "other")
    if "run.name=other" in arguments:
        freeze(config_with("run.name=other", "model.dim=64"), run)
        run.metrics_file(0).write_text('{"step": 1}\n')
    answers = {door: open_door(arguments, capsys) for door, open_door in DOORS.items()}
    refusal = answers["-m"].refusal
    assert [part for part in expected if part not in refusal] == []
    assert set(answers.values()) == {answers["-m"]}, answers
    assert not [path for path in (place / "outputs").glob("*") if path != run.path]


@pytest.mark.parametrize("name", [*REFUSED][:3])
def test_commands_that_write_no_run_refuse_alike(
    name: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, expected = REFUSED[name]
    monkeypatch.setattr("hpc_train.machine.allocation.gpus_to_use", lambda asked: asked)
    of_config = [part for part in expected if part != "run.fork="]
    assert [part for part in of_config if part not in by_bench(arguments, capsys).refusal] == []
    if "optim.lr=-1" in arguments:
        of_config = of_config[:2]  # without valid values the doctor checks no job
    assert [part for part in of_config if part not in by_doctor(arguments, capsys).refusal] == []


def test_every_door_refuses_a_run_that_cannot_go_on_with_its_fewest_nodes(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here in a job of two nodes, where ``script`` describes another job, and a foreground run has one node."""
    in_job(place, monkeypatch)
    small = ["+strategy=pp", "strategy.pp=2", "strategy.dp=1", "cluster.gpus_per_node=0", "cluster.cpu_workers=1"]
    for name in ("-m", "freeze", "script", "api"):
        refusal = DOORS[name]([*small, "cluster.nodes=2", "elastic.min_nodes=1"], capsys).refusal
        assert refusal.startswith("2 pipeline ranks need more than the 1 available workers"), name
    assert DOORS["api"]([*small, "cluster.nodes=2"], capsys).refusal == ""
    freeze_door = DOORS["freeze"]
    assert freeze_door(small, capsys).refusal == "", "the script requests the nodes, not cluster.nodes"
    assert "the 1 available workers" in freeze_door([*small, "elastic.min_nodes=1"], capsys).refusal
    assert "the 1 available workers" in freeze_door([*small, "cluster.nodes=1-2"], capsys).refusal
    assert "the 1 available" in by_doctor([*small, "cluster.nodes=2", "elastic.min_nodes=1"], capsys).refusal


def test_every_door_names_keys_without_an_effect(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "note: optim.momentum=0.5 has no effect with optim=adamw; remove it, or set optim=sgd"
    for name, open_door in DOORS.items():
        answer = open_door(["optim.momentum=0.5", *CPUS], capsys)
        assert answer == Answer("", (note,)), name


def test_keys_for_the_batch_script_have_an_effect_in_its_job(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``script`` prints them as options of sbatch, and its text repeats them for ``freeze``."""
    in_job(place, monkeypatch)
    keys = ["+strategy=dp", "cluster.partition=gpu", "cluster.nodes=2", "elastic.min_nodes=1", *CPUS]
    assert DOORS["script"](keys, capsys) == DOORS["freeze"](keys, capsys) == Answer("")


def test_what_is_printed_for_programs_holds_no_notice(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, key in (("freeze", "run"), ("script", "script")):
        assert cli.run([command, "optim.momentum=0.5", "--json", *CPUS]) == 0
        assert set(json.loads(capsys.readouterr().out)) == {key}


def test_a_refused_command_composes_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("-m", "freeze", "script", "api"):
        forget_compositions()
        with mock.patch.object(hydra, "compose", wraps=hydra.compose) as composing:
            assert "optim.lr is -1.0" in DOORS[name](["optim.lr=-1", *CPUS], capsys).refusal
        assert composing.call_count == 1, name


def test_one_job_is_required(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("freeze", "script", "doctor"):
        assert cli.run([command, "optim.lr=1,2", *CPUS]) == 2
        assert "takes one job, but optim.lr=1,2 make 2" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"bench takes one job, but optim\.lr=1,2 make 2"):
        config_of(["optim.lr=1,2"])


def in_job(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one of a shell in a running Slurm job of two nodes."""
    for name, script in (("srun", "exit 1"), ("scontrol", "exit 1"), ("squeue", "echo RUNNING")):
        write_command(place / "bin", name, script)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")

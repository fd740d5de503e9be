"""The job that ``doctor --submit`` requests, and what the doctor says about a run on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_train.bench.doctor import job
from hpc_train.bench.doctor.job import check_slurm_and_job, composed, resources
from hpc_train.commands import doctor
from hpc_train.config.schema import Config
from hpc_train.launch import command_job
from hpc_train.layout.layout import JobShape, Place
from hpc_train.machine.health.finding import ERROR, OK


@dataclass(frozen=True)
class TwoNodes:
    """Stands for the executor of an allocation of two nodes without GPUs."""

    def shape(self, config: Config) -> JobShape:
        return JobShape(2, 2, 0, config.cluster.cpu_workers, Place.ALLOCATION, in_job=True)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(job, "controller_answers", lambda: False)
    monkeypatch.setattr(job, "select_executor", lambda cluster: TwoNodes())
    return f"run.root={tmp_path}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["cluster.nodes=2", "+strategy=single"],
        ["cluster.nodes=2", "+strategy=pp", "strategy.pp=64"],
        ["cluster.nodes=2", "+strategy=dp", "train.reproducible=any_world_size"],
    ],
)
def test_the_nodes_do_not_depend_on_the_strategy(overrides: list[str], root: str) -> None:
    asked = resources(composed([*overrides, root, "cluster.gpus_per_node=16"]))
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=16"} <= set(asked)
    assert not [option for option in asked if option.startswith(("--time", "--signal", "--requeue", "--ntasks="))]


def test_a_range_of_nodes_is_requested_as_it_is(root: str) -> None:
    asked = resources(composed(["cluster.nodes=2-4", root]))
    assert "--nodes=2-4" in asked and "--ntasks-per-node=1" in asked


def test_the_layout_is_checked_if_a_strategy_is_given(root: str) -> None:
    (plain,) = check_slurm_and_job(composed(["cluster.nodes=2", root]), submits=False)
    assert plain.level == OK and plain.text.startswith("2 nodes (without +strategy=NAME no layout is checked), on CPUs")
    (replicas,) = check_slurm_and_job(composed(["cluster.nodes=2", "+strategy=dp", root]), submits=False)
    assert replicas.level == OK and replicas.text.startswith("dp ")
    (single,) = check_slurm_and_job(composed(["cluster.nodes=2", "+strategy=single", root]), submits=False)
    assert single.level == ERROR and "the layout uses 1 of" in single.text and single.fix


def test_the_command_of_a_job_is_one_task_on_its_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun warns about one task in a job of several nodes unless the step requests one node."""
    sent: list[tuple[Sequence[str], str]] = []

    def sbatch(options: Sequence[str], script: str, comment: str, clusters: str | None) -> str:
        sent.append((options, script))
        return "41"

    monkeypatch.setattr(command_job.client, "submit", sbatch)
    words = ["doctor", f"run.root={tmp_path}", "--json"]
    submitted = command_job.submit(words, Config(), tmp_path, ["--nodes=2"])
    assert submitted.job_id == "41" and submitted.log.parent == tmp_path and submitted.log.name.startswith("doctor-")
    ((options, script),) = sent
    assert [option for option in options if "nodes=" in option or "ntasks" in option] == [
        "--nodes=1",
        "--ntasks-per-node=1",
        "--nodes=2",
    ]
    (step,) = [line for line in script.splitlines() if line.startswith("srun ")]
    assert step.startswith("srun --nodes=1 --ntasks=1 --unbuffered ") and step.endswith(" ".join(words))


def test_the_options_that_other_nodes_need_are_passed_on() -> None:
    given = doctor._parser().parse_args(
        ["--submit", "--verbose", "--nodes", "8", "--nccl", "2.21.5", "--sbatch=--qos=a"]
    )
    assert doctor._words(given) == ["--verbose", "--nodes", "8", "--nccl", "2.21.5"]

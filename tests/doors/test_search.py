"""A sweeper that searches, as Optuna's does: it reads the results of one batch before it launches the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf
from rich.console import Console

from hpc_train.config.schema import CheckpointConfig
from hpc_train.errors import UserError
from hpc_train.launch.job import Job
from hpc_train.launch.launcher import JobFailed, Trials
from hpc_train.launch.submission import Display
from hpc_train.runs.job_status import View
from tests.doors.command import REPOSITORY, TINY, environment, hpc_train
from tests.launch.jobs import make_job

Prepare = Callable[[int, Sequence[str]], Job]
PLUGIN = '''
from dataclasses import dataclass
from typing import Any, Optional

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@dataclass
class Conf:
    _target_: str = "hydra_plugins.of_a_test.ByTurns"
    max_failure_rate: float = 0.0
    params: Optional[Any] = None
    storage: Optional[str] = None


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=Conf)


class ByTurns(Sweeper):
    """Launches one trial after the other, and fails if more of them fail than it may."""

    def __init__(self, max_failure_rate, params, storage):
        self.max_failure_rate = max_failure_rate

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments):
        told = []
        for index, steps in enumerate((0, 2)):
            overrides = [*arguments, f"train.steps={steps}", f"optim.lr={10.0 ** -index}"]
            (result,) = self.launcher.launch([overrides], initial_job_idx=index)
            try:
                told.append(f"{float(result.return_value):.2f}")
            except Exception as error:
                told.append("failed")
                if self.max_failure_rate < 1:
                    raise
        print("told:", *told)
'''


@pytest.mark.long_form(20)  # the parts of a search below
def test_failed_trials_are_failed_and_the_search_goes_on(tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "of_a_test.py").write_text(PLUGIN)
    env = environment(PYTHONPATH=f"{REPOSITORY}:{tmp_path}")
    fixed = [text for text in TINY if "train.steps" not in text]
    storage = "hydra.sweeper.storage='postgresql://me:secret-word@host/db'"
    search = [
        "hydra/sweeper=optuna",
        *fixed,
        storage,
        "cluster=local",
        "cluster.cpu_workers=1",
        "run.name=search",
        "-m",
    ]
    done = hpc_train(*search, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    told = next(line for line in done.stdout.splitlines() if line.startswith("told:")).split()
    assert told[1] == "failed" and float(told[2]) > 0
    assert done.stderr.count("train.steps is 0, but must be at least 1") == 1
    assert "done: 2 steps" not in done.stdout  # the page of a single run
    assert done.stdout.count("job 1 (train.steps=2 optim.lr=0.1): done, val_loss ") == 1
    assert done.stdout.index("told:") < done.stdout.index("1 job: 1 done")
    sweep = tmp_path / "outputs" / "search"
    assert sorted(path.parent.name for path in sweep.glob("*/config.yaml")) == ["1"]
    kept = OmegaConf.load(sweep / "multirun.yaml")
    assert f"run.name={sweep.name}" in kept.hydra.overrides.task
    assert kept.model.dim == 16
    assert "secret-word" not in (sweep / "multirun.yaml").read_text()
    detached = hpc_train(*search, "launch.detach=true", cwd=tmp_path, env=env)
    assert detached.returncode == 2 and "cannot be left running" in detached.stderr, detached.stderr


@pytest.fixture
def job(tmp_path: Path) -> Prepare:
    def prepare(number: int, overrides: Sequence[str]) -> Job:
        if "refused" in overrides:
            raise UserError(f"job {number} is wrong")
        made = replace(make_job(tmp_path / "jobs", number), overrides=tuple(overrides))
        checkpoint = CheckpointConfig(keep_best="val_accuracy" if "best" in overrides else None)
        return replace(made, config=replace(made.config, checkpoint=checkpoint))

    return prepare


class Queue:
    """A queue whose jobs have ended as ``ends`` says: with these metrics, or with an exit code."""

    def __init__(self, ends: Sequence[dict[str, Any] | int], stopped: bool = False) -> None:
        self.ends, self.stopped, self.jobs = list(ends), stopped, list[Job]()
        self.views = [View("failed", {}, end) if isinstance(end, int) else View("done", end, 0) for end in ends]

    def run(self, jobs: Sequence[Job], display: Display) -> Any:
        self.jobs = list(jobs)
        assert len(self.jobs) == len(self.ends)
        display.show([replace(view, exit=None) for view in self.views])
        display.show(self.views)
        display.show(self.views)
        display.close()
        return self


Search = Callable[..., Trials]


@pytest.fixture
def search(tmp_path: Path, job: Prepare) -> Search:
    """Makes a search from the function that runs its jobs; each job has the override ``fixed`` besides its own."""
    return lambda run: Trials(tmp_path, ["fixed=1"], Console(), job, run)


def test_results_are_in_order_and_hold_the_metric_or_the_failure(
    search: Search, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = Queue([{"loss": 3.0, "val_loss": 2.0}, 93, {"val_loss": 1.0, "val_accuracy": 0.5}])
    trials = search(queue.run)
    found = trials.launch([["fixed=1", "optim.lr=0.1"], ["refused"], [], ["best"]], 0)
    assert [each.status for each in found] == [
        JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.FAILED, JobStatus.COMPLETED
    ]  # fmt: skip
    assert (found[0].return_value, found[3].return_value) == (2.0, 0.5)
    assert [item.number for item in queue.jobs] == [0, 2, 3]
    with pytest.raises(JobFailed, match=r"hpc_train why .*/jobs/2 ") as caught:
        _ = found[2].return_value
    assert caught.value.code == 93
    assert capsys.readouterr().out.splitlines() == [
        "job 0 (optim.lr=0.1): done, val_loss 2.0000", "job 2 (): failed", "job 3 (best): done, val_accuracy 0.5000"
    ]  # fmt: skip
    trials.report()
    page = capsys.readouterr().out
    assert "best by val_loss" in page and "3 jobs: 2 done, 1 failed" in page and "retry --failed" in page


def test_a_search_without_a_success_ends(search: Search) -> None:
    with pytest.raises(JobFailed, match="all of its 4 trials have failed") as caught:
        search(Queue([]).run).launch([["refused"]] * 4, 0)
    assert caught.value.code == 2
    trials = search(lambda jobs, display: Queue([1] * len(jobs)).run(jobs, display))
    trials.launch([[], []], 0)
    with pytest.raises(JobFailed, match="all of its 3 trials have failed") as caught:
        trials.launch([[]], 2)
    assert caught.value.code == 1
    with pytest.raises(SystemExit, match="75"):
        search(Queue([1], stopped=True).run).launch([[]], 0)


def test_a_search_in_the_directory_of_another_continues_its_numbers(tmp_path: Path, search: Search) -> None:
    for name in ("0", "10", "code"):
        (tmp_path / name).mkdir()
    queue = Queue([{"loss": 1.0}])
    search(queue.run).launch([[]], 0)
    assert [item.number for item in queue.jobs] == [11]

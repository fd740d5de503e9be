"""The queue and Ctrl-C, with a place that runs nothing."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch import submission
from hpc_train.launch.job import Job
from hpc_train.launch.submission import JobQueue
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import worst_exit
from hpc_train.run.freeze import freeze
from hpc_train.run.processes import process
from hpc_train.runs.job_status import View
from hpc_train.schedulers.scheduler import PRESENT, JobStatus
from tests.launch.jobs import make_job


class FakePlace:
    """Takes two jobs at once; ``end`` ends one as an agent would."""

    name = "a fake place"

    def __init__(self) -> None:
        self.running: dict[str, Job] = {}
        self.order: list[int] = []
        self.stopped: list[str] = []
        self.cancelled: list[str] = []

    def shape(self, cluster: ClusterConfig) -> tuple[int, int, int]:
        return 1, 0, cluster.cpu_workers

    def at_once(self, jobs: Sequence[Job]) -> int:
        return 2

    def submit(self, jobs: Sequence[Job], sweep: Path, at_once: int) -> list[str]:
        for job in jobs:
            self.running[str(job.number)] = job
            self.order.append(job.number)
        return [str(job.number) for job in jobs]

    def identity(self, job_id: str) -> dict[str, Any]:
        return {"job_id": job_id}

    def statuses(self, ids: Collection[str]) -> dict[str, JobStatus]:
        return dict.fromkeys(set(ids) & set(self.running), PRESENT)

    def cancel(self, ids: Collection[str], *, save: bool = False) -> None:
        (self.stopped if save else self.cancelled).extend(ids)
        for job_id in list(ids):
            self.end(job_id, "stopped", 75)

    def output(self, job: Job, job_id: str) -> Path:
        return job.run.path / "agent.err"

    def end(self, job_id: str, event: str = "finished", code: int = 0) -> None:
        job = self.running.pop(job_id)
        EventLog.open(job.run, "agent-n0", job.run.claim_attempt()).write(event, exit_code=code)


@pytest.fixture
def place() -> FakePlace:
    return FakePlace()


@pytest.fixture
def queue(tmp_path: Path, place: FakePlace) -> JobQueue:
    jobs = [make_job(tmp_path / "sweep", number) for number in range(4)]
    return JobQueue(jobs, place, tmp_path / "sweep", Console(file=io.StringIO(), width=200))


def printed(queue: JobQueue) -> str:
    return queue._console.file.getvalue()  # type: ignore[attr-defined]


def steps(monkeypatch: pytest.MonkeyPatch, *actions: Callable[[], None]) -> None:
    """Each sleep of the waiting loop does the next action; threads of this process sleep as usual."""
    todo = iter(actions)
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=lambda seconds: next(todo)())
    monkeypatch.setattr(submission, "time", clock)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_jobs_are_submitted_in_turn(queue: JobQueue, place: FakePlace) -> None:
    queue.advance()
    assert place.order == [0, 1]
    queue.advance()
    assert place.order == [0, 1]
    place.end("1")
    queue.advance()
    assert place.order == [0, 1, 2]
    for job_id in ("0", "2"):
        place.end(job_id)
    queue.advance()
    place.end("3")
    queue.advance()
    assert queue.over
    assert submission.report(queue, queue._console) == 0


def test_one_interrupt_leaves_the_jobs_running(
    queue: JobQueue, place: FakePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(monkeypatch, interrupt, lambda: None)
    display = mock.Mock(close=lambda: queue._console.print("the last state"))
    with pytest.raises(SystemExit) as left:
        submission.wait(queue, queue._console, display=display)
    assert left.value.code == 130
    assert place.order == [0, 1, 2, 3], "what still waited was handed over"
    assert place.stopped == []
    assert "to save and stop:  python -m hpc_train cancel " in printed(queue).partition("the last state\n")[2]


@pytest.mark.parametrize(("answer", "cancelled"), [("y", True), ("Yes", True), ("s", False)])
def test_two_interrupts_offer_to_cancel_the_jobs_and_wait_for_them(
    queue: JobQueue,
    place: FakePlace,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    cancelled: bool,
) -> None:
    monkeypatch.setattr(submission, "can_ask", lambda console: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
    steps(monkeypatch, interrupt, interrupt, lambda: None)
    submission.wait(queue, queue._console)
    assert (place.cancelled if cancelled else place.stopped) == ["0", "1"]
    assert (place.stopped if cancelled else place.cancelled) == []
    assert place.order == [0, 1]
    assert submission.report(queue, queue._console) == 1
    assert "python -m hpc_train retry --failed " in printed(queue)


def test_what_is_said_of_cancelled_jobs(queue: JobQueue) -> None:
    queue._views = {job.number: View("cancelled", {}, exit=75) for job in queue.jobs}
    assert submission.report(queue, queue._console) == 75
    assert "4 jobs: 4 cancelled" in printed(queue)
    assert "python -m hpc_train retry --failed " in printed(queue)


@pytest.mark.parametrize(
    ("code", "how"), [(75, "cancelled; resume with:"), (1, "cancelled before the first checkpoint; start again with:")]
)
def test_what_is_said_of_a_cancelled_job(
    tmp_path: Path, place: FakePlace, capsys: pytest.CaptureFixture[str], code: int, how: str
) -> None:
    queue = JobQueue([make_job(tmp_path / "sweep", 0)], place, tmp_path / "sweep", Console(file=io.StringIO()))
    queue._views = {0: View("cancelled", {}, exit=code)}
    assert submission.report(queue, queue._console) == code
    assert capsys.readouterr().out.startswith(f"{how}\n  python -m hpc_train -m run.name=sweep/0 +strategy=dp")


@pytest.mark.parametrize("answer", ["n\n", "\n", "", None])
def test_two_interrupts_leave_who_does_not_want_to_cancel_or_has_no_terminal(
    queue: JobQueue, place: FakePlace, monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    if answer is not None:
        monkeypatch.setattr(submission, "can_ask", lambda console: True)
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    steps(monkeypatch, interrupt, interrupt)
    with pytest.raises(SystemExit) as left:
        submission.wait(queue, queue._console)
    assert left.value.code == 130
    assert place.stopped == place.cancelled == []
    assert "hpc_train cancel" in printed(queue)


def test_one_failure_fails_all(queue: JobQueue, place: FakePlace) -> None:
    queue.submit_all()
    place.end("0")
    place.end("1", "failed", 1)
    place.end("2", "failed", 2)
    place.end("3", "stopped", 75)
    queue.advance()
    assert queue.over
    assert submission.report(queue, queue._console) == 1


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([], 0), ([0, 0], 0), ([0, 1, 75], 1), ([75, 93], 93), ([93, 2], 2), ([0, None], 1), ([75, None], 75)],
)
def test_the_exit_code_of_a_sweep_is_that_of_its_worst_job(codes: list[int | None], worst: int) -> None:
    assert worst_exit(codes) == worst


@pytest.mark.parametrize(("exit_code", "summaries"), [(0, 1), (2, 0), (None, 0)])
def test_the_summary_is_that_of_a_job_that_is_done(exit_code: int | None, summaries: int, tmp_path: Path) -> None:
    """A run with a result is resumed: it is done, refused because its checkpoints are gone, or left by Ctrl-C."""
    job, output = make_job(tmp_path / "sweep"), io.StringIO()
    freeze(job.config, job.run)
    job.run.update_record(result={"steps": 4, "loss": 2.0}, total_steps=4)
    progress = submission.JobProgress(job, Console(file=output))
    progress.show([View("done", {}, exit_code)])
    progress.close()
    assert output.getvalue().count("done: 4 steps") == summaries


def test_of_two_commands_that_resume_a_run_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other command claims the run after this one has found it free."""
    job, other = make_job(tmp_path / "sweep"), subprocess.Popen(["sleep", "60"])
    freeze(job.config, job.run)

    def claim(jobs: Sequence[Job], console: Console) -> None:
        job.run.update_record(claimed_by=process(other.pid))

    executor = SimpleNamespace(shape=lambda config: job.shape, check=lambda jobs: [], confirm=claim)
    monkeypatch.setattr(submission, "select_executor", lambda cluster: executor)
    item: Any = SimpleNamespace(run=job.run, config=job.config, number=0, trusts_owner=False)
    try:
        with pytest.raises(UserError, match=f"is live: process {other.pid}"):
            submission.resubmit([item], tmp_path / "sweep", detach=True)
    finally:
        other.kill()
        other.wait()

"""``telemetry.profile``: traces of chosen steps and ranks, and what the steps are made of."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_train.config.schema import ProfileConfig
from hpc_train.config.values import Profiled, check_profiled_steps, parse_profile
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.telemetry.progress import summary
from hpc_train.train.watch.profiler import Profiler, time_breakdown
from tests.train.runs import frozen, run_attempt


def event(name: str, start: float, end: float) -> Any:
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start * 1e6, end=end * 1e6))


def test_what_steps_are_made_of() -> None:
    events = [
        event("aten::mm", 0, 2),
        event("aten::relu", 1, 3),
        event("gloo:all_reduce", 2, 5),
        event("gloo:recv", 4, 6),
        event("gloo:send", 5.5, 5.75),
        event("hook", 0, 10),
    ]
    found = time_breakdown(events, elapsed_s=10.0, data_s=1.0, device=torch.device("cpu"), stages=True)
    expected = {"compute": 0.3, "communication": 0.2, "bubble": 0.1, "data": 0.1, "host": 0.3}
    assert found.shares() == pytest.approx(expected)
    crowded = time_breakdown(events, elapsed_s=6.0, data_s=2.0, device=torch.device("cpu"), stages=True)
    assert crowded.shares()["host"] == 0 and sum(crowded.shares().values()) == pytest.approx(1)


def test_steps_and_ranks_as_they_are_written() -> None:
    assert parse_profile(ProfileConfig()) is None
    assert parse_profile(ProfileConfig("7")) == Profiled(7, 7, frozenset({0}))
    assert parse_profile(ProfileConfig("10-12", [0, 3])) == Profiled(10, 12, frozenset({0, 3}))
    assert parse_profile(ProfileConfig("10-12", "all")) == Profiled(10, 12, None)


@pytest.mark.parametrize(
    ("steps", "ranks"), [("0", 0), ("5-4", 0), ("ten", 0), ("5", -1), ("5", "0,3"), ("5", []), ("5", 2), ("5", [0, 2])]
)
def test_what_cannot_be_profiled_is_refused(steps: str, ranks: Any) -> None:
    with pytest.raises(UserError, match=r"telemetry\.profile|no rank 2 of 2"):
        check_profiled_steps(ProfileConfig(steps, ranks), world_size=2)


def test_a_profile_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    asked = Profiled(1, 1, frozenset({0}))
    run.profile.touch()  # a file where the folder is to be
    mesh: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), layout=SimpleNamespace(pp=1))
    profiler = Profiler(asked, run, mesh, EventLog.open(run, "rank-0000", 0, 0))
    profiler.begin(1, 0.0)
    assert profiler._profiler is not None
    profiler._report({0: profiler._stop(profiler._profiler, asked.name, 0.0)}, 1, 1)
    assert capsys.readouterr().out.count(f"cannot write the profile to {run.profile}: [Errno 17]") == 2


def test_the_files_are_named_after_the_steps_of_a_profile_that_ended_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *_, **named: None)
    run = RunDirectory(tmp_path)
    layout = SimpleNamespace(pp=1, world_size=2)
    mesh: Any = SimpleNamespace(rank=1, device=torch.device("cpu"), layout=layout, control=None)
    profiler = Profiler(Profiled(2, 9, None), run, mesh, EventLog.open(run, "rank-0001", 0, 1))
    profiler.begin(2, 0.0)
    profiler.end(3, 0.0, last=True)
    assert [path.name for path in run.profile.iterdir()] == ["steps-2-3-rank-0001.json.gz"]


@pytest.mark.long_form(10)  # the profile, its report and its files are checked above
def test_a_run_with_a_profile(tmp_path: Path) -> None:
    profile = ["telemetry.profile.steps=2-3", "telemetry.profile.ranks=[1]"]
    small = ["model.n_layers=2", "train.steps=3", "elastic.collective_timeout_s=300"]  # a busy machine writes slowly
    run = frozen(tmp_path / "run", "+strategy=pp", *small, *profile)
    assert run_attempt(run, 2) == [0, 0]
    (trace,) = run.profile.glob("*.json.gz")
    assert trace.name == "steps-2-3-rank-0001.json.gz"
    with gzip.open(trace) as file:
        names = {entry.get("name", "") for entry in json.load(file)["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    found = json.loads((run.profile / "summary.json").read_text())
    assert (found["first"], found["last"], list(found["ranks"])) == (2, 3, ["1"])
    assert sum(found["ranks"]["1"].values()) == pytest.approx(1)
    assert found["ranks"]["1"]["compute"] > 0 and found["ranks"]["1"]["bubble"] > 0
    table = (run.profile / "summary.txt").read_text()
    assert table in (run.logs / "rank-0-000.log").read_text()
    assert [event["ranks"] for event in run.read_events() if event["event"] == "profiled"] == [found["ranks"]]
    assert "profile:         steps 2 to 3: compute" in summary(run)


@pytest.mark.long_form(6)
def test_a_run_that_ends_inside_of_its_profile(tmp_path: Path) -> None:
    run = frozen(tmp_path / "run", "+strategy=single", "train.steps=3", "telemetry.profile.steps=2-9")
    assert run_attempt(run, 1) == [0]
    assert json.loads((run.profile / "summary.json").read_text())["last"] == 3
    assert [path.name for path in run.profile.glob("*.json.gz")] == ["steps-2-3-rank-0000.json.gz"]

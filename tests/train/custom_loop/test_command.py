"""A script that knows nothing of hpc_train is started, watched, restarted and stopped; it saves its own state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from hpc_train.elastic.decision import ended_without_report
from hpc_train.elastic.script import FolderLooks, FolderProgress, ScriptProgress, StepLog
from hpc_train.elastic.workers import class_of_script_end
from hpc_train.machine.kernel_counters import OomKills
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import Clock
from hpc_train.run.exits import Exit, Failure, end_of_script
from hpc_train.run.snapshot import snapshot_code
from tests.config.composing import config_of
from tests.elastic.test_agent import alive, until
from tests.train.custom_loop.runs import failures, frozen, run_agent

SCRIPT = Path(__file__).with_name("script.py")


def command(*words: object) -> str:
    return f"run.command=[{','.join(map(str, words))}]"


def seen(folder: Path, attempt: int, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / f"seen-{attempt}-{rank}.json").read_text())
    return found


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a git repository with the script and a module next to it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copy(SCRIPT, tree)
    (tree / "words.py").write_text("LAST = 'the last words'\n")
    git(tree, "init", "--quiet")
    monkeypatch.chdir(tree)
    return tree


def test_a_script_that_is_killed_hangs_and_is_preempted_goes_on(tmp_path: Path, tree: Path) -> None:
    """It is frozen with the module that it imports."""
    faults = ("kill:1:5", "hang:0:9", "SIGUSR2:1:12")
    case = command("python", "script.py", tmp_path, 15, *faults), "elastic.hang_timeout_s=3"
    run = frozen(tmp_path / "run", *case, code=snapshot_code([config_of(*case)], tmp_path / "code"))
    (tree / "words.py").write_text("LAST = 'changed'\n")
    code, error = run_agent(run)
    assert code == 75, error
    assert failures(run) == [("killed", 1), ("hang", 0)]
    assert "killed by SIGKILL\nlast output:\nthe last words" in error
    assert not alive(int((tmp_path / "child").read_text())), "all processes of a script end with it"
    code, error = run_agent(run)
    assert code == 0, error
    assert not alive(int((tmp_path / "child").read_text())), "also when it ends with 0"
    totals = [json.loads((tmp_path / f"saved-{rank}.json").read_text()) for rank in range(2)]
    assert totals == [[15, 120], [15, 240]]
    assert [line["step"] for line in run.read_metrics()][-1] == 15, "the file of rank 0 says so"
    assert len({seen(tmp_path, attempt, 0)["MASTER_PORT"] for attempt in range(4)}) == 4
    known = seen(tmp_path, 3, 1)
    assert ".code" in Path(known.pop("file")).parts
    assert known | {"MASTER_PORT": ""} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "", "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_RUN_ID": run.record()["run_id"], "TORCHELASTIC_USE_AGENT_STORE": "False", "cwd": str(tree),
    }  # fmt: skip


@pytest.mark.long_form(6)  # test_exit_codes
def test_a_script_that_ends_with_2_is_not_repeated(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('as it was')\nsys.exit(2)\n")
    run = frozen(tmp_path / "run", command("python", script), "cluster.cpu_workers=1")
    code, error = run_agent(run)
    assert code == 2
    assert "run.command exited with code 2: as it was" in error
    assert failures(run) == [("refused", 0)]


WRITES_FILES = """
import os, sys, time
from pathlib import Path
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    for number in range(8):
        Path(sys.argv[1], str(number)).touch()
        time.sleep(0.5)
    time.sleep(1000)
"""


@pytest.mark.long_form(15)  # test_progress_is_a_touch_a_number_or_a_newer_file
def test_a_script_hangs_when_no_newer_file_appears_in_its_directory(tmp_path: Path) -> None:
    script, folder = tmp_path / "writes_files.py", tmp_path / "checkpoints"
    script.write_text(WRITES_FILES)
    folder.mkdir()
    run = frozen(
        tmp_path / "run", command("python", script, folder), f"run.progress_dir={folder}", "elastic.hang_timeout_s=5"
    )
    began = time.monotonic()
    code, error = run_agent(run)
    assert code == 0, error
    assert failures(run) == [("hang", 0)]
    assert time.monotonic() - began > 8, "newer files were signs of life for some seconds"


@pytest.mark.parametrize(
    ("code", "asked", "expected"),
    [
        (0, False, Exit.DONE), (75, False, Exit.STOPPED), (1, False, Failure.USER_ERROR), (2, False, Failure.REFUSED),
        (127, False, Failure.REFUSED), (3, False, Failure.EXITED), (-9, False, Failure.KILLED),
        (137, False, Failure.KILLED), (0, True, Exit.STOPPED), (1, True, Exit.STOPPED), (-15, True, Exit.STOPPED),
    ],
)  # fmt: skip
def test_exit_codes(code: int, asked: bool, expected: Exit | Failure) -> None:
    assert end_of_script(code, asked) is expected


TRACEBACK = ["Connection refused, trying again", "Traceback (most recent call last):", "  File x"]


@pytest.mark.parametrize(
    ("code", "last", "expected"),
    [
        (1, "ValueError: wrong", Failure.USER_ERROR),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", Failure.OUT_OF_MEMORY),
        (1, "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer", Failure.COMMUNICATION),
        (2, "train.py: error: the following arguments are required: out of memory", Failure.REFUSED),
        (139, "", Failure.KILLED),
    ],
)
def test_the_output_of_a_script_tells_its_class(code: int, last: str, expected: Failure) -> None:
    by_code = end_of_script(code, False)
    assert isinstance(by_code, Failure)
    found, message = class_of_script_end(code, by_code, OomKills(0, 0), [*TRACEBACK, last])
    assert found is expected
    assert message == ("killed by SIGSEGV" if code == 139 else f"run.command exited with code {code}: {last}")


def test_progress_is_a_touch_a_number_or_a_newer_file(tmp_path: Path) -> None:
    looks, folder = FolderLooks(tmp_path / "checkpoints", nodes=1, bound_s=1800), FolderProgress()
    metrics = StepLog(RunDirectory(tmp_path), 0, 2, Clock())
    progress = ScriptProgress(tmp_path / "progress", folder, metrics)
    assert progress.beat() is None, "a script that shows nothing is not watched"
    (tmp_path / "progress").touch()
    first = progress.beat()
    assert first is not None
    assert progress.beat() == first
    (tmp_path / "progress").write_text("7\n")
    second = progress.beat()
    assert second is not None
    assert (first.step, second.step) == (1, 7)
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last" / "model").touch()
    os.utime(tmp_path / "checkpoints" / "last" / "model", (time.time() + 60, time.time() + 60))
    folder.note(until(lambda: looks.new(time.monotonic())))
    third = progress.beat()
    assert third is not None
    assert third.since > second.since
    progress.close()
    assert [line["step"] for line in RunDirectory(tmp_path).read_metrics()] == [7]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([*TRACEBACK, "ValueError: ", "Invalid log settings: junk", "Valid settings:", "all"],
         "ValueError: Invalid log settings: junk"),
        ([*TRACEBACK, "KeyboardInterrupt"], "KeyboardInterrupt"),
        ([*TRACEBACK, "OSError: [Errno 5] Input/output error", "wandb: synced 5 files"],
         "OSError: [Errno 5] Input/output error"),
        (["no license", ""], "no license"),
    ],
)  # fmt: skip
def test_the_exception_of_a_script_is_told_and_not_what_it_prints_after_it(output: list[str], words: str) -> None:
    _, message = class_of_script_end(1, Failure.USER_ERROR, OomKills(0, 0), output)
    assert message == f"run.command exited with code 1: {words}"


def test_a_silent_script_is_reported_once() -> None:
    end = class_of_script_end(7, Failure.EXITED, OomKills(0, 0))
    assert ended_without_report(0, 7, end, [], 0.0).traceback == "run.command exited with code 7\nit printed nothing"

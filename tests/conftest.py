"""Defines the options, fixtures and hooks of all tests."""

from __future__ import annotations

import compileall
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hpc_train import cli
from tests.checkpoint.progress import IN_LONG_FORM, LONG
from tests.config.composing import share_compositions
from tests.config.reading import read_once
from tests.doors.command import REPOSITORY, TEMPORARY, environment
from tests.doors.schema import check_output
from tests.warm_parents import shared, with_server
from tests.warm_parents.sitecustomize import SOCKET, STARTS, redirect

# With -n the tests of each of these folders run in one process: those on Slurm share clusters, the others ranks that
# have compiled and cached what they use (``tests/ranks.py``).
TOGETHER = ("tests/slurm/", "tests/parallel/", "tests/checkpoint/")
# The tests of these files and folders run first, in this order: the folders of one process and the files of more than
# 40 seconds, so that no process runs one of them alone at the end, then the folders whose files take several seconds.
HEAVY = (
    "tests/parallel/",
    "tests/slurm/",
    "tests/doors/test_readme.py",
    "tests/checkpoint/",
    "tests/faults/test_faults.py",
    "tests/bad_input/test_refused.py",
    "tests/train/test_resume.py",
    "tests/elastic/test_agent.py",
    "tests/elastic/test_hub.py",
    "tests/faults/",
    "tests/doors/",
    "tests/train/",
    "benchmarks/",
    "tests/telemetry/",
    "tests/train/watch/",
    "tests/config/",
)
# Read by OpenMP when torch is imported: threads that wait for each other sleep. Otherwise they spin, and processes that
# share the cores, each with a thread per core, take several times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported; no test depends on a network
SOURCES = ("hpc_train", "hydra_plugins", "examples", "tests", "benchmarks", "gpu_checks")
# The long forms that --long-share draws from besides the cases with the mark long_form, with the seconds that a case
# takes on two cores.
LONG_FORMS = {
    "tests/faults/test_faults.py::test_twenty_trials[": 120,
    "tests/faults/test_nodes.py::": 90,
    "tests/faults/test_slurm.py::": 100,
    "tests/checkpoint/test_crash_states.py::": 120,
    "tests/checkpoint/test_errors.py::": 400,
}
MOST_STARTS = 50  # of agents in the short form, each of which takes seconds
SHARE_S = 600  # planned for the cases of a share
BEGINS_S = 600  # after this time no case of a share starts
CASE_S = 240  # a case that is to take longer is in no share
LIMIT_S = 360  # a case of a share that takes longer fails


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-share", metavar="SEED", help="run only the long forms that SEED draws; minutes")


@pytest.fixture(autouse=True)
def _shared_compositions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the commands that the tests run in one process share compositions, except in the tests of composing."""
    if request.path.parent.name != "config":
        share_compositions(monkeypatch)


@pytest.fixture
def called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a command in this process, in ``tmp_path``; the command must start no workers."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        with mock.patch.dict(os.environ, environment(), clear=True):
            try:
                code: Any = cli.run(arguments)
            except SystemExit as end:  # argparse raises it
                code = end.code
        done = subprocess.CompletedProcess(arguments, int(code or 0), *capsys.readouterr())
        if "--json" in arguments:
            check_output(arguments, done.stdout)
        return done

    return call


def pytest_configure(config: pytest.Config) -> None:
    """Creates a temporary directory for this session, compiles the sources for the many processes that the tests start,
    and ensures that started processes receive SIGINT and SIGHUP; lets Hydra read each file once.

    A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Child processes inherit ignored
    signals, but not handlers, so this hook installs handlers.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    if TEMPORARY not in os.environ:  # the processes of -n inherit it
        os.environ[TEMPORARY] = tempfile.mkdtemp(prefix="hpc_train-")
        Path(os.environ[TEMPORARY]).chmod(0o1777)
        os.environ[STARTS] = str(Path(os.environ[TEMPORARY], "starts"))
        Path(os.environ[STARTS]).touch()
        Path(os.environ[STARTS]).chmod(0o666)
        config.add_cleanup(partial(os.close, shared.begin(os.environ[TEMPORARY])))
        config.add_cleanup(partial(shutil.rmtree, os.environ[TEMPORARY], ignore_errors=True))
        if sys.dont_write_bytecode:  # otherwise the first process keeps what it compiles
            for folder in SOURCES:
                compileall.compile_dir(REPOSITORY / folder, quiet=2)
    redirect(lambda: with_server({}).get(SOCKET))  # for the ranks: the processes of -n share what one server imports
    read_once()
    gc.disable()  # until all tests are collected
    config.stash[KEEPS_NO_BYTECODE], sys.dont_write_bytecode = sys.dont_write_bytecode, False


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stops keeping bytecode: that of the test modules, whose assertions pytest rewrites, is kept.

    What the collection has made stays to the end, and the collector leaves it alone from now on.
    """
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = session.config.stash[KEEPS_NO_BYTECODE]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the longest files first, so that with ``-n`` no process runs one of them alone at the end, and skips the
    cases of the long form in the short one."""
    items.sort(key=_place)
    for item in items:
        if not LONG and _long_form(item) is not None:
            item.add_marker(IN_LONG_FORM)
    if config.getoption("--long-share") is not None:
        items[:] = _long_share(items, config.getoption("--long-share"))
        print("\nlong forms of this share:", *(item.nodeid for item in items), sep="\n  ")
        config.stash[BEGAN] = time.monotonic()


def _place(item: pytest.Item) -> int:
    return next((place for place, head in enumerate(HEAVY) if item.nodeid.startswith(head)), len(HEAVY))


BEGAN = pytest.StashKey[float]()
KEEPS_NO_BYTECODE = pytest.StashKey[bool]()


def _long_share(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Returns the cases of every share, and those that ``seed`` draws, in turn from each folder, until they fill
    SHARE_S; the same code gives the same cases."""
    seconds = {item: cost for item in items if (cost := _seconds(item))}
    chosen = [item for item in seconds if (mark := _long_form(item)) and mark.kwargs.get("every_share")]
    folders: dict[Path, list[pytest.Item]] = {}
    for item in random.Random(seed).sample(others := [item for item in seconds if item not in chosen], len(others)):
        folders.setdefault(item.path.parent, []).append(item)
    left = SHARE_S - sum(seconds[item] for item in chosen)
    for item in filter(None, chain(*zip_longest(*folders.values()))):
        if seconds[item] <= min(left, CASE_S):
            chosen.append(item)
            left -= seconds[item]
    for item in chosen:
        item.add_marker(pytest.mark.timeout(LIMIT_S))
    return chosen


def _long_form(item: pytest.Item) -> pytest.Mark | None:
    """Returns the mark that puts a case in the long form: one whose ``cases``, if it has any, are its parameters."""
    for mark in item.iter_markers("long_form"):
        cases = mark.kwargs.get("cases")
        if cases is None or any(f"{_parameters(item)}-".startswith(f"{case}-") for case in cases):
            return mark
    return None


def _parameters(item: pytest.Item) -> str:
    return item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""


def _seconds(item: pytest.Item) -> int:
    """Returns the seconds that a case of a long form takes on two cores, and 0 for other cases."""
    for head, seconds in LONG_FORMS.items():
        if item.nodeid.startswith(head):
            return seconds
    mark = _long_form(item)
    return 0 if mark is None else mark.args[0]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips cases when the time of the share is used up, so that a slow machine runs fewer of them."""
    if time.monotonic() - item.config.stash.get(BEGAN, float("inf")) > BEGINS_S:
        pytest.skip("the time of the share is used up")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session of the short form that has started too many agents."""
    if not LONG and not hasattr(session.config, "workerinput") and _starts() > MOST_STARTS:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    most = "" if LONG else f", of at most {MOST_STARTS} (MOST_STARTS in tests/conftest.py)"
    terminalreporter.write_line(f"{_starts()} starts of agents{most}")


def _starts() -> int:
    return len(Path(os.environ[STARTS]).read_text().splitlines())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes tests by file with ``-n``, since those of a file share fixtures, and by folder those of TOGETHER."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in TOGETHER if file.startswith(folder)), file)

    config.option.loadscopereorder = False  # keep the order of HEAVY; files with few tests may be the slowest
    return ByFile(config, log)

"""Each recipe of docs/howto/recipes.md continues after a killed rank and after the time limit.

Agents on this machine are the nodes of a job that HPC_TRAIN_NODES describes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from hpc_train.run.directory import RUN_DIRECTORY, RunDirectory
from tests.config.test_packaging import NO_INDEX, pip_install
from tests.doors.command import REPOSITORY, environment
from tests.recipes import stand_ins
from tests.recipes.programs import PROGRAMS, STEPS, Program
from tests.slurm.cluster import wait_for

NODES = ("127.0.0.2", "127.0.0.3")
PATIENCE_S = 240
PAGE = (REPOSITORY / "docs/howto/recipes.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def files(text: str) -> dict[str, str]:
    """Returns the files in the text of a section, by name."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.DOTALL | re.MULTILINE))


def python_with(program: Program, folder: Path) -> Path:
    """Returns the interpreter of an environment in ``folder`` that has the packages; skips if pip has no index."""
    if not program.packages:
        return Path(sys.executable)
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    behind = [path for path in sys.path if path.endswith("site-packages")]
    (site / "behind.pth").write_text("\n".join(behind) + "\n")
    for module in program.modules:
        (site / f"{module}.py").touch()
    done = pip_install(folder, "--no-deps", "--no-build-isolation", *program.packages)
    without_index = [line for line in done.stderr.splitlines() if NO_INDEX.search(line)]
    if done.returncode and without_index:
        pytest.skip(f"pip cannot reach its index: {without_index[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([python, "-c", program.prepare], env=os.environ | extensions(python), check=True)
    (folder / "complete").touch()
    return python


def extensions(python: Path) -> dict[str, str]:
    """Returns the variable that names the directory of compiled operators."""
    return {"TORCH_EXTENSIONS_DIR": str(python.parents[1] / "extensions")}


def steps_of(run: RunDirectory) -> list[list[int]]:
    """Returns the steps that the output of each attempt shows, without attempts that ended before the first step."""
    attempts: dict[str, list[int]] = {}
    for path in sorted(run.logs.glob("*.log")):
        found = [int(step) for step in re.findall(rf"\b(\d+)/{STEPS}\b", path.read_text())]
        attempts.setdefault(path.stem[-3:], []).extend(step for step in found if step > 0)
    return [steps for _, steps in sorted(attempts.items()) if steps]


def processes_of(run: RunDirectory) -> dict[int, list[psutil.Process]]:
    """Returns the processes of each rank, the oldest first."""
    found: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
        if variables.get(RUN_DIRECTORY) == str(run.path) and "RANK" in variables:
            found.setdefault(int(variables["RANK"]), []).append(process)
    for of_rank in found.values():
        of_rank.sort(key=psutil.Process.create_time)
    return found


Begin = Callable[[int], list[subprocess.Popen[bytes]]]


def disturb(run: RunDirectory, program: Program, begin: Begin) -> None:
    """Kills the last rank after a checkpoint, announces the time limit after the restart, and starts the job again."""
    folder = run.path.parents[1]
    agents = begin(0)

    def wait(what: str, done: Callable[[], bool]) -> None:
        wait_for(what, lambda: done() or any(agent.poll() is not None for agent in agents), PATIENCE_S)
        assert done(), (folder / "agent-0-0").read_text()

    wait("a checkpoint", lambda: any(folder.glob(program.checkpoint)))
    processes_of(run)[program.nodes * program.processes - 1][0].kill()
    wait("steps after the restart", lambda: len(steps_of(run)) > 1)
    agents[0].send_signal(signal.SIGUSR2)
    assert {agent.wait(PATIENCE_S) for agent in agents} == {75}
    wait_for("the last process of the run", lambda: not processes_of(run), PATIENCE_S)
    agents = begin(1)
    assert {agent.wait(PATIENCE_S) for agent in agents} == {0}
    wait_for("the last process of the run", lambda: not processes_of(run), PATIENCE_S)  # Ray's end by themselves


CASES = [  # 300 s with an installation
    pytest.param(title, marks=pytest.mark.long_form(300 if program.packages else 150))
    for title, program in PROGRAMS.items()
]


@pytest.mark.timeout(900)  # the installation
@pytest.mark.parametrize("title", CASES)
def test_a_program_continues(title: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    program = PROGRAMS[title]
    digest = hashlib.sha256(repr((program.packages, program.modules, program.prepare)).encode()).hexdigest()[:8]
    cache = request.config.cache
    assert cache is not None
    python = python_with(program, cache.mkdir(f"recipe-{digest}"))
    stand_ins.write_model(tmp_path / "model")
    stand_ins.write_chats(tmp_path / "data")
    written = files(section("Save at the time limit")) | dict.fromkeys(program.before, "") | files(section(title))
    for name, shown in written.items():
        text = program.before.get(name, "") + shown
        for there, here in program.instead.items():
            text = text.replace(there, here)
        (tmp_path / name).write_text(text)
    (command,) = re.findall(r"^hpc-train exec .* -- (.*)$", section(title), re.MULTILINE)
    run = RunDirectory(tmp_path / "outputs" / "run")
    with ExitStack() as started:
        begin = starter(python, program, shlex.split(command), tmp_path, started)
        disturb(run, program, begin)

    kills = [event["rank"] for event in run.read_events() if event.get("class") == "killed"]
    assert kills == [program.nodes * program.processes - 1]
    first, *_, before_limit, last = steps_of(run)
    assert min(first) == 1
    assert min(before_limit) > 1
    assert min(last) > (max(before_limit) if program.saves else 1)
    assert max(last) == STEPS


def starter(python: Path, program: Program, words: list[str], folder: Path, started: ExitStack) -> Begin:
    """Returns a function that starts the agents of all nodes in a start of the job, given by its number.

    Args:
        started: ends the agents.
    """
    variables = environment(
        PATH=f"{python.parent}:{os.environ['PATH']}",
        HPC_TRAIN_NODES=",".join(NODES[: program.nodes]),
        HPC_TRAIN_JOB_ID=folder.name,  # the port of the ranks follows from it
        HPC_TRAIN_REQUEUE="true",
        HF_HUB_OFFLINE="1",
        HF_HOME=str(folder / "cache"),
        AXOLOTL_DO_NOT_TRACK="1",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_raylet_start_wait_time_s="120",  # a loaded machine
        OMP_NUM_THREADS="1",
        TQDM_MININTERVAL="0",  # a progress bar prints every step
        TQDM_MINITERS="1",
    )
    per = ["--per", "node"] if program.processes == 1 else ["--nproc-per-node", str(program.processes)]
    variables |= extensions(python)
    command = [python, "-m", "hpc_train", "exec", "--name", "run", *per, "--", *words]

    def begin(start: int) -> list[subprocess.Popen[bytes]]:
        agents = []
        for node in range(program.nodes):
            place = {"HPC_TRAIN_NODE_RANK": str(node), "HPC_TRAIN_LAUNCH": str(start), "HPC_TRAIN_RESTART": str(start)}
            with (folder / f"agent-{node}-{start}").open("w") as output:
                agent = subprocess.Popen(
                    command, cwd=folder, env=variables | place, stdout=output, stderr=subprocess.STDOUT
                )
            started.callback(agent.wait, PATIENCE_S)
            started.callback(agent.terminate)
            agents.append(agent)
        return agents

    return begin

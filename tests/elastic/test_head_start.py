"""The import of torch starts with the command. A package that stands in for torch tells when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpc_train.commands.early import submits, threads_of_worker, trains_here
from hpc_train.machine.environment import threads_per_rank
from hpc_train.run.processes import process_state

REPOSITORY = Path(__file__).parents[2]
TORCH = """
import multiprocessing, os, sys, time
print("a warning of the import", file=sys.stderr)
open(os.environ["IMPORTED"], "a").write("imported\\n")
time.sleep(float(os.environ["IMPORT_S"]))
"""
FIRST = """
import sys
from hpc_train import cli
from hpc_train.elastic.warm_parent.head_start import HeadStart
HeadStart.begin = lambda threads: sys.exit(f"{threads} {({'hydra', 'omegaconf'} & {*sys.modules})}")
cli.run(sys.argv[1:])
"""
ENDS = """
import os, pathlib, signal, sys, time
from hpc_train.elastic.warm_parent.head_start import head_start
with head_start(1) as begun:
    print(begun._pid, flush=True)
    while not pathlib.Path(os.environ["IMPORTED"]).exists():
        time.sleep(0.005)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit("refused")
"""
CONTINUES = """
import os, sys
from hpc_train.elastic.warm_parent.head_start import head_start
from hpc_train.elastic.worker_process import fork_process, start_warm_parent
with head_start(1) as begun:
    early = begun._pid
    os.environ.update({"OMP_NUM_THREADS": "1"} | eval(sys.argv[1]))
    sys.path[:] = [*filter(None, [os.environ.get("PYTHONPATH", "").split(":")[0]]), *sys.path]
    os.umask(0o027)
    os.chdir("elsewhere")
    pid = start_warm_parent(["torch"], begun)
    fork_process(exec, "import os, sys; mask = os.umask(0); torch = sys.modules['torch'].__file__; "
                 "files = str([getattr(module, '__file__', None) for module in sys.modules.values()]); "
                 "print('early_forkserver' in files, oct(mask), os.getcwd(), torch, os.environ.get('OMP_NUM_THREADS'), "
                 "flush=True)").join()
    print(pid == early, "early_forkserver" in open(f"/proc/{pid}/cmdline").read())
"""

FORKS_TWICE = """
import os, signal, sys, time
from hpc_train.elastic.warm_parent.imports import LaterImports
LaterImports("colorsys", 0.05).prepare()
for _ in range(2):
    if os.fork() == 0:
        print("colorsys" in sys.modules, signal.getsignal(signal.SIGALRM) == signal.SIG_DFL, flush=True)
        os._exit(0)
    os.wait()
    time.sleep(0.1)
"""
LATER = """
import time
from hpc_train.elastic.worker_process import fork_process, start_warm_parent
start_warm_parent(["torch"])
for _ in range(20):
    fork_process(exec, "import signal, sys; print('torch._dynamo' in sys.modules, "
                       "signal.getsignal(signal.SIGALRM) == signal.SIG_DFL, flush=True)").join()
    time.sleep(2.5)
    if "True True" in open("told").read():
        break
"""


def stand_in(folder: Path) -> None:
    """Writes packages that stand in for torch into ``folder``."""
    (folder / "torch" / "distributed").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(TORCH)
    (folder / "torch" / "distributed" / "__init__.py").touch()
    (folder / "torch" / "distributed" / "checkpoint.py").touch()


def python(folder: Path, script: str, *words: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """Runs a script in ``folder`` with the stand-in of ``folder/packages``, whose import takes ``seconds``."""
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, (folder / "packages", REPOSITORY))),
        "HPC_TRAIN_ROOT": str(folder / "runs"),
        "IMPORTED": str(folder / "imported"),
        "IMPORT_S": str(seconds),
    }
    environment: Mapping[str, str] = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | own
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False, timeout=60)


def test_the_import_starts_before_hydra_is_imported(tmp_path: Path) -> None:
    done = python(tmp_path, FIRST, "cluster=local", "cluster.cpu_workers=1", "cluster.gpus_per_node=0")
    assert done.stderr == f"{threads_per_rank('auto', 1)} set()\n"


def test_the_import_of_an_agent_starts_before_its_own_imports(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("cluster:\n  gpus_per_node: 0\n  cpu_workers: 1\nrun:\n  command: null\n")
    done = python(tmp_path, FIRST, "agent", str(tmp_path))
    assert done.stderr == f"{threads_per_rank('auto', 1)} set()\n"


@pytest.mark.parametrize(("end", "told"), [("refused", "refused\n"), ("killed", "")])
def test_a_command_that_does_not_train_leaves_no_import_behind(tmp_path: Path, end: str, told: str) -> None:
    stand_in(tmp_path / "packages")
    done = python(tmp_path, ENDS, end, seconds=600)
    assert done.stderr == told
    until = time.monotonic() + 30
    while (left := process_state(int(done.stdout))) not in ("", "Z") and time.monotonic() < until:
        time.sleep(0.01)
    assert left in ("", "Z")


@pytest.mark.parametrize(
    ("variables", "code", "same_process"),
    [
        ({"TRITON_CACHE_DIR": "/tmp/cache"}, "packages", True),
        ({"OMP_NUM_THREADS": "7"}, "packages", False),  # it would be read too late
        ({"PYTHONPATH": "{folder}/frozen"}, "frozen", True),
    ],
)
@pytest.mark.long_form(4, cases=["variables2"])  # the case before it starts another process too
def test_the_warm_parent_is_as_a_new_process_would_be(
    tmp_path: Path, variables: dict[str, str], code: str, same_process: bool
) -> None:
    for name in ("packages", "frozen"):
        stand_in(tmp_path / name)
    (tmp_path / "elsewhere").mkdir()
    variables = {name: value.format(folder=tmp_path) for name, value in variables.items()}
    done = python(tmp_path, CONTINUES, repr(variables))
    torch, threads = tmp_path / code / "torch" / "__init__.py", variables.get("OMP_NUM_THREADS", "1")
    worker, told = done.stdout.splitlines()
    continues = same_process and code == "packages"
    assert worker == f"False 0o27 {tmp_path / 'elsewhere'} {torch} {threads}", done.stderr
    assert told == f"{same_process} {continues}"
    if continues:
        assert (tmp_path / "imported").read_text() == "imported\n"


def test_a_process_that_has_forked_imports_more_for_its_next_forks(tmp_path: Path) -> None:
    done = python(tmp_path, FORKS_TWICE)
    assert done.stdout.splitlines() == ["False True", "True True"], done.stderr


@pytest.mark.long_form(6)  # the case before
def test_what_the_first_lines_do_not_need_is_imported_for_the_workers_after_a_failure(tmp_path: Path) -> None:
    stand_in(tmp_path / "packages")
    (tmp_path / "packages" / "torch" / "_dynamo.py").touch()
    (tmp_path / "told").touch()
    done = python(tmp_path, f"import os, sys\nos.dup2(os.open('told', os.O_WRONLY), 1)\n{LATER}")
    first, *_, last = (tmp_path / "told").read_text().splitlines()
    assert (first, last) == ("False True", "True True"), done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["+strategy=dp", "cluster=local"], True),
        (["+strategy=dp", "cluster=local", "--json"], True),
        (["+strategy=dp", "cluster=local", "launch.dry_run=false"], True),
        (["+strategy=dp"], False),  # it may be refused: this is a login node
        (["+strategy=dp", "cluster=local", "-m"], False),
        (["+strategy=dp", "cluster=local", "--cfg", "job"], False),
        (["+strategy=dp", "cluster=slurm"], False),
        (["+strategy=dp", "cluster=local", "launch.dry_run=true"], False),
        (["+strategy=dp", "cluster=local", "hydra.mode=MULTIRUN"], False),
        (["cluster=local", "run.command=[python,train.py]"], False),
    ],
)
def test_no_import_starts_for_a_submission_or_a_look(tmp_path: Path, words: list[str], expected: bool) -> None:
    (tmp_path / "sbatch").touch(mode=0o755)
    assert trains_here(words, {"PATH": str(tmp_path)}) is expected


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        (["+strategy=dp", "-m"], {}, True),
        (["+strategy=dp", "cluster=slurm", "--multirun"], {}, True),
        (["+strategy=dp"], {}, False),
        (["+strategy=dp", "cluster=local", "-m"], {}, False),
        (["+strategy=dp", "-m"], {"SLURM_JOB_ID": "7"}, False),
        (["+strategy=dp", "-m"], {"PATH": ""}, False),
    ],
)
def test_slurm_is_asked_early_only_for_a_submission_to_it(
    tmp_path: Path, words: list[str], more: dict[str, str], expected: bool
) -> None:
    (tmp_path / "sbatch").touch(mode=0o755)
    assert submits(words, {"PATH": str(tmp_path), **more}) is expected


def test_the_node_of_a_job_and_a_machine_without_slurm_train(tmp_path: Path) -> None:
    (tmp_path / "sbatch").touch(mode=0o755)
    assert trains_here(["+strategy=dp"], {"PATH": str(tmp_path), "SLURMD_NODENAME": "n1"})
    assert trains_here(["+strategy=dp"], {"PATH": ""})


@pytest.mark.parametrize(
    ("values", "workers"), [({}, 4), ({"cluster.cpu_workers": "1"}, 1), ({"train.threads": "3"}, 0)]
)
def test_the_threads_are_those_of_the_workers(values: dict[str, str], workers: int) -> None:
    expected = threads_per_rank("auto", workers) if workers else 3
    assert threads_of_worker({"cluster.gpus_per_node": "0", **values}) == expected

"""Schedulers other than Slurm: one that a user writes from the page, and the templates, with stand-ins for commands.

The stand-ins start what they are given as the manuals of PBS, LSF and Flux say, in a new environment with the variables
of the scheduler.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY, TINY, environment, hpc_train

NODES = "127.0.0.2\n127.0.0.3\n"
OVERRIDES = [*TINY, "+strategy=dp", "cluster.cpu_workers=1", "cluster.gpus_per_node=0", "run.name=first"]

# The server of PBS: it runs a job in the background, after the job that it depends on.
QSUB = r"""
echo "qsub $*" >> {folder}/calls
number=$(ls {folder} | grep -c '^job[0-9]*$')
script={folder}/job$number
if [ -f "${{@: -1}}" ]; then cp "${{@: -1}}" $script; else cat > $script; fi
echo "$2" > $script.name
[[ $* != *" -v "* ]] || export "$(sed 's/.* -v \([^ ]*\).*/\1/' <<< "$*")"
before=$(sed -n 's/.*afterany:\([0-9]*\).*/\1/p' <<< "$*")
export PBS_JOBID=$number.pbs01 PBS_NODEFILE={folder}/nodefile PBS_O_WORKDIR=$PWD
setsid bash -c 'while kill -0 $0 2> /dev/null; do sleep 0.2; done; exec bash $1' \
  "$([ -z "$before" ] || cat {folder}/job$before.pid)" $script > {folder}/out$number 2>&1 < /dev/null &
echo $! > $script.pid
if [ -e {folder}/silent ]; then rm {folder}/silent; echo "qsub: cannot connect to server" >&2; exit 1; fi
echo $number.pbs01
"""
TOOLS = {
    "pbs_tmrsh": 'shift; exec env -i HOME="$HOME" PATH=/usr/bin:/bin PBS_JOBID=$PBS_JOBID {fixed} "$@"',
    "blaunch": 'shift; exec env -i HOME="$HOME" PATH=/usr/bin:/bin LSB_JOBID=$LSB_JOBID {fixed} "$@"',
    "ssh": 'shift 3; exec env -i HOME="$HOME" PATH=/usr/bin:/bin {fixed} bash -c "$*"',
    "qsub": QSUB,
    "qselect": "for name in {folder}/job*.name; do"
    ' [ "$(cat $name 2> /dev/null)" != "$2" ] || echo "$(basename ${{name%.name}} | tr -d job).pbs01"; done',
    "qstat": "for id in $(shift; echo $*); do"
    " kill -0 $(cat {folder}/job${{id%%.*}}.pid) 2> /dev/null && echo $id u q n 1 2 2 -- 01:00 R 00:01; done",
    "qdel": "kill -- -$(cat {folder}/job${{1%%.*}}.pid)",
    "qsig": "pkill -USR1 -g $(cat {folder}/job${{3%%.*}}.pid) -f 'hpc_train agent'",
}


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Returns a function that makes commands of a scheduler, and returns an environment that has them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nodefile").write_text(NODES)

    def make(**variables: str) -> dict[str, str]:
        fixed = f"PYTHONPATH={REPOSITORY} CUDA_VISIBLE_DEVICES= HPC_TRAIN_STRICT_EVENTS=1"
        for name, text in TOOLS.items():
            tool = folder / name
            tool.write_text(f"#!/bin/bash\n{text.format(folder=folder, fixed=fixed)}\n")
            tool.chmod(0o755)
        path = f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
        return environment(PATH=path, PYTHONPATH=f"{REPOSITORY}:{tmp_path}", **variables)

    return make


def page_file(tmp_path: Path) -> None:
    """Writes the scheduler of docs/schedulers.md."""
    page = (REPOSITORY / "docs/schedulers.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_site").mkdir()
    (tmp_path / "my_site/pbs.py").write_text(code)


def test_a_scheduler_that_is_written_from_the_page_trains_on_two_nodes(
    tmp_path: Path, tools: Callable[..., dict[str, str]]
) -> None:
    """The answer to the submission is lost, and the job is submitted once nevertheless."""
    page_file(tmp_path)
    env = tools()
    (tmp_path / "bin/silent").touch()
    options = [*OVERRIDES, "cluster.kind=my_site.pbs:SCHEDULER", "cluster.nodes=2"]
    done = hpc_train("-m", *options, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "bin/out0").read_text()
    assert (tmp_path / "bin/calls").read_text().count("qsub") == 1
    run = RunDirectory(tmp_path / "outputs/first")
    (submission,) = run.record()["submissions"]
    assert (submission["job_id"], submission["scheduler"]) == ("0.pbs01", "my_site.pbs:SCHEDULER")
    assert run.attempt_record(0)["nodes"] == 2
    status = hpc_train("status", "first", "--json", cwd=tmp_path, env=env)
    assert json.loads(status.stdout)["state"] == "done"
    dry = hpc_train("-m", *options, "run.name=second", "launch.dry_run=true", cwd=tmp_path, env=env)
    assert "pbs_tmrsh" in dry.stdout and not (tmp_path / "outputs/second").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("SCHEDULER = PBS()", ""), "defines no SCHEDULER"),
        (("def cancel", "def end"), "cancel"),
        (("import shlex", "import torch"), "torch"),
        (("SCHEDULER = PBS()", "SCHEDULER = PBS"), "must be a Scheduler"),
    ],
)
def test_a_wrong_scheduler_is_refused_before_anything_is_submitted(
    tmp_path: Path, tools: Callable[..., dict[str, str]], change: tuple[str, str], message: str
) -> None:
    page_file(tmp_path)
    file = tmp_path / "my_site/pbs.py"
    file.write_text(file.read_text().replace(*change))
    done = hpc_train("-m", *OVERRIDES, "cluster.kind=my_site.pbs:SCHEDULER", cwd=tmp_path, env=tools())
    assert done.returncode == 2
    assert message in done.stderr and "fix:" in done.stderr
    assert not (tmp_path / "outputs").exists()

"""No value of a config becomes a line or a command of a batch script."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_train.bench import measuring
from hpc_train.config.schema import ClusterConfig
from hpc_train.errors import UserError
from hpc_train.launch import command_job
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import arguments, identity, options
from hpc_train.launch.script import (
    Script,
    comment,
    container_of,
    freezing,
    one_run,
    python_lines,
    render,
    run_of_task,
    setup_lines,
    shell_word,
)
from hpc_train.run.code import FrozenCode
from tests.doors.command import REPOSITORY
from tests.launch.jobs import make_job

HARMLESS = "harmless"
PAYLOADS = [
    "a\ntouch CANARY",
    "a\rtouch CANARY",
    "a\r\n#SBATCH --account=other",
    "a\u2028touch CANARY",
    "a\x85touch CANARY\x0b\x0c\x1c",
    "a\0touch CANARY",
    "\n#SBATCH --account=other\n",
    "`touch CANARY`",
    "$(touch CANARY)",
    "'; touch CANARY; '",
    '"; touch CANARY; "',
    "\\\ntouch CANARY",
    "a # b\ttouch CANARY",
    "\udcfftouch\nCANARY",
]
SETTINGS = dict.fromkeys(
    ["partition", "account", "qos", "constraint", "exclude", "nodelist", "reservation", "switches", "comment"], "x"
)


def test_bash_reads_a_word_as_the_value(tmp_path: Path) -> None:
    draw = random.Random(0)
    alphabet = "ab \n\r\t'\"\\$`!#;&|<>(){}*?~=%\x01\x7f\x85\u2028\u00e9\u65e5"
    values = [*(value for value in PAYLOADS if "\0" not in value)]
    values += ["".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(500)]
    words = [shell_word(value) for value in values]
    assert not any(len(word.splitlines()) > 1 for word in words)
    script = "".join(f"printf '%s\\0' {word}\n" for word in words).encode()
    done = subprocess.run(["bash"], input=script, capture_output=True, check=True, cwd=tmp_path)
    found = done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    assert found == values
    with pytest.raises(UserError, match="NUL"):
        shell_word("a\0b")


@pytest.mark.parametrize("value", PAYLOADS)
def test_a_comment_is_one_line(value: str) -> None:
    assert len(comment(value).splitlines()) == 1 and comment(value).startswith("# ")


def scripts(job: Job) -> list[str]:
    """Returns all kinds of batch scripts of a job."""
    config, run = job.config, job.run.path
    container = container_of(config, job.gpus)
    asked = {**options(job), **identity([job], run, str(run / "out"))}
    code = FrozenCode(str(run), str(run), (str(run / "code"),), None, None)
    title = f"hpc_train, {config.strategy.name}: {job.layout}"
    submitted = Script(title, config.cluster, one_run(run), {}, code, run / "chain", container, ["note"])
    printed = Script(title, config.cluster, freezing(config.cluster, job.overrides, container), asked)
    array = Script(title, config.cluster, run_of_task(run / "listing"), {})
    arguments(asked)
    return [
        *map(render, (submitted, printed, array)),
        command_job._script(["checkpoint", "verify", str(run)], config, run / "code"),
        measuring._script(job, ["step", *job.overrides], run / "result"),
    ]


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every key of a config that may hold text."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            found, kind = getattr(value, field.name), str(field.type)
            if isinstance(found, str) or (found is None and "str" in kind):
                yield (*path, field.name)
            elif isinstance(found, dict) and path[-1:] == ("cluster",):
                yield (*path, field.name, "NAME")
                yield (*path, field.name, "")  # the name itself
            elif dataclasses.is_dataclass(found):
                yield from strings(found, (*path, field.name))


def with_value(job: Job, path: tuple[Any, ...], value: str) -> Job:
    config = copy.deepcopy(job.config)
    at: Any = config
    *parents, last = path
    for name in parents:
        at = at[name] if isinstance(at, dict) else getattr(at, name)
    if isinstance(at, dict):
        at[last or value] = value
    else:
        setattr(at, last, value)
    overrides = (*job.overrides, f"{'.'.join(path)}={value}")
    return dataclasses.replace(job, config=config, overrides=overrides)


def tried(job: Job) -> list[str]:
    """Returns the lines of the job's scripts; none if it is refused."""
    try:
        return "".join(scripts(job)).splitlines()
    except UserError as error:
        assert error.where and error.fix
        return []


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("hpc_train.launch.script.srun_has_pyxis", lambda: False)
    cluster = ClusterConfig(kind="slurm", cpu_workers=2, **SETTINGS)  # type: ignore[arg-type]
    cluster.container.image = "docker://image"
    return make_job(tmp_path / "sweep", cluster=cluster)


def test_no_value_of_any_key_becomes_a_line_of_a_script(job: Job) -> None:
    paths = list(strings(job.config))
    assert len(paths) > 60 and ("cluster", "env", "NAME") in paths and ("strategy", "name") in paths
    reached = set()
    for path in paths:
        base = tried(with_value(job, path, HARMLESS))
        for payload in PAYLOADS:
            lines = tried(with_value(job, path, payload))
            if not lines:
                continue
            reached.add(path)
            assert len(lines) == len(base), f"{path} with {payload!r} adds a line"
            for before, after in zip(base, lines, strict=True):
                if before.startswith("export HPC_TRAIN_EXPORTED=") and after.rpartition("=")[2].isalnum():
                    continue  # a digest of the values
                assert before == after or HARMLESS in before, f"{path} with {payload!r} changes {before!r} to {after!r}"
                if before != after and not after.startswith("# ") and payload.isprintable():
                    words, found = (shlex.split(line.removesuffix(" \\")) for line in (before, after))
                    assert found == [word.replace(HARMLESS, payload) for word in words], f"{path}: {after!r}"
    assert reached


def run_bash(text: str, folder: Path) -> None:
    """Runs the lines of a script up to its step."""
    subprocess.run(["bash"], input=text.encode("utf-8", "surrogateescape"), cwd=folder, check=False)


@pytest.mark.parametrize("change", [("strategy", "name"), ("cluster", "env", "NAME"), ("cluster", "env", "")])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_of_a_value_is_executed(
    job: Job, change: tuple[str, ...], payload: str, tmp_path: Path, script: Callable[[Job], str]
) -> None:
    try:
        text = script(with_value(job, change, payload))
    except UserError:
        return
    head = text.partition("\n\n# what the container")[0]
    run_bash(head, tmp_path)
    assert not (tmp_path / "CANARY").exists()


@pytest.fixture
def script() -> Callable[[Job], str]:
    return lambda job: scripts(job)[0]


@pytest.mark.parametrize("line", ["export A=1\r", "a\0b"])
def test_what_sbatch_refuses_in_setup_is_refused_before(job: Job, line: str) -> None:
    job.config.cluster.setup.append(line)
    with pytest.raises(UserError, match=r"cluster\.setup"):
        scripts(job)


def test_a_line_of_the_setup_that_fails_is_named_and_the_script_goes_on(tmp_path: Path) -> None:
    lines = ["module() {\n  return 3\n}", "module load nope\ntrue", "export A=1"]
    script = tmp_path / "job.sbatch"
    script.write_text("\n".join([*setup_lines(lines), "false", "echo $A"]))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.stderr == "cluster.setup: a line failed with status 3: module load nope\n"
    assert done.stdout == "1\n"


def test_a_setup_that_ends_the_job_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("\n".join([*setup_lines(["exit 3"]), "echo never"]))
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "cluster.setup ended the job with status 3\n")


def test_a_python_that_the_node_does_not_have_is_named() -> None:
    cluster = ClusterConfig(python="/nonexistent/bin/python 3")
    script = "\n".join([*python_lines(cluster), "echo never"])
    done = subprocess.run(
        ["bash", "-c", script], env={"SLURMD_NODENAME": "n1"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "n1 has no /nonexistent/bin/python 3, which is cluster.python\n  fix:    cluster.python=" in done.stderr
    assert subprocess.run(["bash", "-c", "\n".join(python_lines(ClusterConfig()))], check=False).returncode == 0


def test_a_python_without_the_dependencies_of_hpc_train_is_named(tmp_path: Path) -> None:
    """Whatever the first module is that a command needs; two tracebacks say it otherwise."""
    call = [sys.executable, "-S", "-m", "hpc_train", "agent", str(tmp_path)]
    environment = {"PYTHONPATH": str(REPOSITORY), "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"python\S* on \S+ has no module \w+, which hpc_train needs", done.stderr)
    assert "cluster.python=PATH" in done.stderr

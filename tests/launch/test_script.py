"""The text of batch scripts, whole, against files: what reaches other people's clusters is read before it changes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_train.checkpoint.space import StopTime
from hpc_train.commands import batch
from hpc_train.config.schema import ClusterConfig, Config, ElasticConfig, GPTConfig
from hpc_train.errors import UserError
from hpc_train.launch import command_job
from hpc_train.launch.job import Job
from hpc_train.launch.sbatch import (
    arguments,
    check_script_signal,
    identity,
    options,
    output_file,
    script_signal,
    stop_note,
)
from hpc_train.launch.script import (
    Container,
    Script,
    blocks_of,
    by_hand,
    comment,
    container_of,
    explanation,
    freezing,
    one_run,
    python_lines,
    render,
    run_of_task,
    setup_lines,
    shell_word,
)
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import append_line
from hpc_train.schedulers.slurm.site import NodeKind, Partition, Site
from tests.doors.command import REPOSITORY
from tests.launch.jobs import make_job

GOLDEN = Path(__file__).parent / "golden"
RUN = Path("/scratch/my runs/one")
BINDS = ("/scratch/my runs:/scratch/my runs", "/data:/inside")
APPTAINER = Container("/images/torch 2.sif", False, BINDS, gpus=True)
PYXIS = Container("nvcr.io#nvidia/pytorch:25.09-py3", True, BINDS, gpus=True)
INSIDE = ClusterConfig(kind="slurm")
PLAIN = ClusterConfig(kind="slurm", python="/opt/python/bin/python")
FULL = ClusterConfig(
    kind="slurm",
    nodes="2-4",
    gpus_per_node=4,
    partition="gpu",
    account="lab",
    qos="long",
    time="1-00:00:00",
    time_min="04:00:00",
    cpus_per_gpu=8,
    mem_per_gpu="64G",
    gpu_type="a100",
    constraint="rack1",
    exclude="n7",
    nodelist="n1",
    exclusive=True,
    clusters="one",
    extra={"wckey": "thesis", "begin": "now+1hour", "get-user-env": True, "mail-type": "END,FAIL"},
    env={"NCCL_DEBUG": "WARN", "WORDS": "two words"},
    setup=["module load python", "source ~/env/bin/activate"],
    teardown=["cp -r /tmp/profile ."],
    python="python",
)


def scripts(tmp_path: Path) -> dict[str, Script]:
    header = options(make_job(tmp_path / "sweep", cluster=FULL, gpus=4))
    return {
        "one_run": Script("hpc_train, dp", PLAIN, one_run(RUN), ()),
        "array": Script(
            "hpc_train, 3 runs of one shape",
            PLAIN,
            run_of_task(Path("/scratch/sweep/slurm/runs-00000")),
            (),
        ),
        "chain": Script("hpc_train, dp", PLAIN, one_run(RUN), (), chain=RUN / "attempts" / "chain-000"),
        "first": Script("hpc_train, dp", PLAIN, one_run(RUN), (), first=RUN / "attempts" / "first-000"),
        "apptainer": Script("hpc_train, dp", INSIDE, one_run(RUN), (), container=APPTAINER),
        "pyxis": Script("hpc_train, dp", INSIDE, freezing(INSIDE, ["+strategy=dp"], PYXIS), (), container=PYXIS),
        "standalone": Script("hpc_train, dp", FULL, freezing(FULL, ["+strategy=dp", "data.path=a b"]), [header]),
    }


@pytest.mark.parametrize("name", ["one_run", "array", "chain", "first", "apptainer", "pyxis", "standalone"])
def test_the_text(name: str, tmp_path: Path) -> None:
    text = render(scripts(tmp_path)[name])
    assert text == (GOLDEN / f"{name}.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("name", ["chain", "apptainer", "standalone"])
def test_each_line_of_a_script_is_explained_on_one_screen(name: str, tmp_path: Path) -> None:
    script = scripts(tmp_path)[name]
    rows = explanation(blocks_of(script))
    assert len(rows) <= 45 and all(len(reason) <= 110 for _, _, reason in rows)
    lines = ["", *render(script).splitlines()]
    explained = [number for first, last, _ in rows for number in range(first, last + 1)]
    assert explained == sorted(set(explained)) and explained[-1] == len(lines) - 1
    assert all(not lines[number] for number in set(range(1, len(lines))) - {*explained}), "between the blocks"
    for first, last, reason in rows:
        if lines[first].startswith("#SBATCH"):
            assert first == last and reason.startswith(lines[first].split()[1].partition("=")[0])
    said = "\n".join(reason for _, _, reason in rows)
    assert ("launch.chain" in said) == (name == "chain") and ("container" in said) == (name == "apptainer")
    assert all(key in said for key in ("cluster.account", "cluster.extra", "cluster.env")) == (name == "standalone")


def claim_of(run: Path) -> tuple[Path, str]:
    """Returns the file with the job of ``cluster.first`` that has started, and the lines of a script that write it."""
    first = run / "attempts" / "first-000"
    text = render(Script("hpc_train, dp", PLAIN, one_run(run), (), first=first))
    return first, text[text.index("FIRST=") : text.index("# A step ends only")]


@pytest.mark.parametrize("seed", range(20))
def test_one_of_three_jobs_that_start_at_the_same_time_trains(seed: int, tmp_path: Path) -> None:
    """The jobs of cluster.first, of which two start at once; all run twice, as after a requeue."""
    run = tmp_path / "a run"
    (run / "attempts").mkdir(parents=True)
    first, claim = claim_of(run)
    draw = random.Random(seed)
    ids = ["41", "42", "43"]
    knows_others = draw.random() < 0.5  # the submitter writes the file after it has submitted all
    if knows_others:
        first.with_name(f"{first.name}.jobs").write_text("".join(f"{job}\n" for job in ids))
    delays = draw.sample([0.0, 0.0, draw.random() / 20], 3)
    script = f'scancel() {{ echo "scancel $*"; }}; job=$1; sleep "$2"; {claim}\necho trains'
    winners = []
    for _ in range(2):
        started = {}
        for job, delay in zip(ids, delays, strict=True):
            words = ["bash", "-c", script, "job.sbatch", job, str(delay)]
            started[job] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = {job: process.communicate(timeout=30)[0].splitlines() for job, process in started.items()}
        assert all(process.returncode == 0 for process in started.values())
        (trained,) = (job for job, lines in said.items() if "trains" in lines)
        others = " ".join(job for job in ids if job != trained)
        assert said.pop(trained) == [f"scancel {others}"] * knows_others + ["trains"]
        assert not any(said.values()), "the others exit quietly"
        assert first.read_text() == f"{trained}\n"
        winners.append(trained)
        delays.reverse()
    assert winners[0] == winners[1], "the job that was first stays so when it is requeued"
    assert {path.name for path in first.parent.iterdir()} <= {first.name, f"{first.name}.jobs"}


def test_a_job_that_cannot_record_its_start_says_so(tmp_path: Path) -> None:
    _, claim = claim_of(tmp_path / "gone")
    script = f"sleep() {{ :; }}; job=1; {claim}\necho trains"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "first-000 cannot be created, so this job does not start the run" in done.stderr


def test_the_rest_of_a_script_by_hand() -> None:
    text = by_hand(survives=True)
    assert text == (GOLDEN / "by_hand.sh").read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    ends = text.replace("--no-kill --kill", "--kill").replace("continue without it", "end too")
    assert by_hand(survives=False) == ends
    outside = subprocess.run(["bash", "-c", text, "x.sbatch"], env={}, capture_output=True, text=True, check=False)
    assert outside.returncode == 2 and "fix:    sbatch x.sbatch with the same arguments" in outside.stderr


def test_what_an_image_is_and_what_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm"))
    asked, root = job.config.cluster.container, f"{tmp_path}:{tmp_path}"
    assert container_of(job.config, 0) is None
    asked.image, asked.binds = "docker://site/image", ["/data", "/data:/inside"]
    monkeypatch.setattr("hpc_train.launch.script.srun_has_pyxis", lambda: True)
    assert container_of(job.config, 4) == Container(
        "docker://site/image", True, (root, "/data:/data", "/data:/inside"), True
    )
    job.config.cluster.gpu_type = "mi250x"
    on_amd = container_of(job.config, 8)
    assert on_amd is not None
    assert on_amd.rocm
    assert replace(on_amd, pyxis=False).command("/a")[:3] == ["apptainer", "exec", "--rocm"]
    asked.image = str(tmp_path / "torch.sif")
    with pytest.raises(UserError, match=r"torch\.sif does not exist"):
        container_of(job.config, 0)
    Path(asked.image).touch()
    found = container_of(job.config, 0)
    assert found is not None
    assert not found.pyxis, "a .sif is Apptainer's"
    seen = f"{root},/data:/data,/data:/inside,{tmp_path}/sweep:{tmp_path}/sweep"
    assert found.seen({"TMPDIR": f"{tmp_path}/sweep", "SLURM_TMPDIR": "/not/there"}) == seen
    assert found.command("/a:/a") == ["apptainer", "exec", "--bind", "/a:/a", asked.image]


def test_every_key_becomes_an_option(tmp_path: Path) -> None:
    asked = " ".join(arguments(options(make_job(tmp_path / "sweep", cluster=FULL, gpus=4))))
    assert asked == (
        "--clusters=one --partition=gpu --account=lab --qos=long --nodes=2-4 --ntasks-per-node=1 "
        "--gpus-per-node=a100:4 --cpus-per-task=32 --mem=256G --exclusive --constraint=rack1 --nodelist=n1 "
        "--exclude=n7 --time=1-00:00:00 --time-min=04:00:00 --signal=USR2@120 --requeue --open-mode=append "
        "--wckey=thesis --begin=now+1hour --get-user-env --mail-type=END,FAIL"
    )


def test_the_memory_of_another_option_replaces_the_default(tmp_path: Path) -> None:
    asked = replace(FULL, mem_per_gpu="auto", extra={"mem-per-cpu": "2G"})
    options_asked = options(make_job(tmp_path / "sweep", cluster=asked, gpus=4))
    assert "mem" not in options_asked
    assert options_asked["mem-per-cpu"] == "2G"
    asked = replace(asked, mem="100G")
    with pytest.raises(UserError, match=r"has mem-per-cpu and cluster\.mem is set"):
        options(make_job(tmp_path / "sweep", cluster=asked, gpus=4))
    assert identity([make_job(tmp_path / "mine", cluster=PLAIN)], tmp_path / "mine", "x")["job-name"] == "mine"


def test_slurm_replaces_nothing_in_the_path_of_an_output() -> None:
    assert output_file(Path("/scratch/50%x runs/%j"), "%j.out") == "/scratch/50%%x runs/%%j/%j.out"
    with pytest.raises(UserError, match="has a backslash"):
        output_file(Path("/scratch/a\\b"), "%j.out")


def test_cores_and_memory_are_the_share_of_the_gpus(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm", gpus_per_node=2), gpus=2)
    kinds = (NodeKind(4, 64, 512000, {"a100": 4}), NodeKind(4, 48, 256000, {"a100": 4}), NodeKind(9, 128, 9, {}))
    share = options(job, Site("here", partitions={"gpu": Partition("gpu", default=True, kinds=kinds)}))
    assert (share["cpus-per-task"], share["mem"]) == ("24", "128000M")
    partition = Partition("gpu", default=True, kinds=kinds, cores_per_gpu=7, memory_default=True)
    default = options(job, Site("here", partitions={"gpu": partition}))
    assert default["cpus-per-task"] == "14"
    assert "mem" not in default


def test_a_node_of_its_own_is_taken_whole(tmp_path: Path) -> None:
    cluster = ClusterConfig(kind="slurm", gpus_per_node=4, exclusive=True, gres="nvme:10,gpu:v100:4")
    asked = options(make_job(tmp_path / "sweep", cluster=cluster, gpus=4))
    assert (asked["mem"], asked["gres"]) == ("0", "nvme:10,gpu:v100:4")
    assert not {"cpus-per-task", "gpus-per-node"} & set(asked)


def test_a_short_job_is_not_asked_to_stop_at_its_start(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm", time="00:03:00"))
    assert options(job)["signal"] == "USR2@60"


def test_a_job_is_asked_to_stop_in_time_for_its_save(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="slurm", nodes=4, time="1-00:00:00"))
    model = GPTConfig(vocab_size=32000, n_layers=80, dim=8192, n_heads=64, n_kv_heads=8, ffn_dim=28672)
    job.config.model = model  # 69 billion parameters: 828 GB at 2 GB/s, twice, and two minutes
    assert options(job)["signal"] == "USR2@960"
    assert "2 x 771 GiB at 0.5 GB/s per node" in stop_note(job)
    events = EventLog.open(job.run, "rank-0000", job.run.claim_attempt())
    for step, seconds in ((1, 41.0), (2, 77.0)):
        events.write("checkpoint_saved", step=step, seconds=seconds)
    append_line(job.run.metrics_file(0), {"step": 1, "step_s": 12.0})
    job.run.claim_attempt()  # has no step yet
    assert options(job)["signal"] == "USR2@210"  # 2 x 77 + 2 x 12 + 30
    assert "the slowest save so far (77 s)" in stop_note(job)
    job.config.elastic.stop_grace_s = 45.5
    assert options(job)["signal"] == "USR2@45"


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(kind="slurm", extra={"nodes": 3}),
        ClusterConfig(kind="slurm", extra={"output": "x"}),
        ClusterConfig(kind="slurm", mem_per_gpu="much"),
    ],
)
def test_what_cannot_be_asked(cluster: ClusterConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        options(make_job(tmp_path / "sweep", cluster=cluster))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("#SBATCH --signal=USR2@120  # before the limit", ("USR2", 120, False)),
        ("#SBATCH --nodes=2 --signal B:USR1@600", ("USR1", 600, True)),
        ("#SBATCH --signal=USR2", ("USR2", 60, False)),
        ("#SBATCH --signal=USR2@60\n#SBATCH --signal=USR2@90", ("USR2", 90, False)),
        ("#SBATCH --signal='R:SIGUSR2@60'", ("USR2", 60, False)),
        ("#SBATCH --signal=br:sigterm", ("TERM", 60, True)),
        ("#SBATCH --signal=10@300", ("USR1", 300, False)),
        ("##SBATCH --signal=USR2@120", None),
        ("#SBATCH --nodes=2\n\necho\n#SBATCH --signal=USR2@120", None),
    ],
)
def test_the_signal_of_a_script(lines: str, expected: tuple[str, int, bool] | None) -> None:
    found = script_signal(f"#!/bin/bash\n{lines}\n")
    assert (None if found is None else (found.name, found.lead_s, found.to_shell)) == expected


@pytest.mark.parametrize(
    ("asked", "fix"),
    [
        ("USR2@120", None),
        ("R:USR2@120", None),
        ("SIGUSR1@60", None),  # as stops the agents: near the limit they take it for Slurm's
        ("15@300", None),
        ("B:USR2@60", None),  # job.sh passes it on
        ("B:10@60", None),
        ("B:TERM@60", "USR2@90"),  # scancel sends it too
        ("URG@300", "USR2@300"),
        ("INT@300", "USR2@300"),  # as Ctrl-C in a shell of salloc
        ("KILL", "USR2@90"),
    ],
)
def test_a_signal_that_reaches_no_agent_is_refused(asked: str, fix: str | None) -> None:
    script = f'#!/bin/bash\n#SBATCH --signal={asked}\nsource "$RUN/job.sh" agent\n'
    if fix is None:
        check_script_signal(script, StopTime(90.0, ""))
    else:
        with pytest.raises(UserError, match=f"--signal={asked} sends ") as found:
            check_script_signal(script, StopTime(90.0, ""))
        assert found.value.fix == f"#SBATCH --signal={fix}"
    if asked.startswith("B:"):
        with pytest.raises(UserError, match="the batch script alone"):
            check_script_signal(script.replace('source "$RUN/job.sh"', "srun"), StopTime(90.0, ""))


def test_a_script_whose_signal_comes_too_late() -> None:
    warning = check_script_signal("#SBATCH --signal=USR2@120\n", StopTime(690.0, "2 x 140 GiB at 0.5 GB/s per node"))
    assert warning is not None
    assert "120 s before the time limit" in warning
    assert "--signal=USR2@690" in warning
    assert check_script_signal("#SBATCH --signal=USR2@120\n", StopTime(120.0, "")) is None
    assert check_script_signal("srun agent\n", StopTime(690.0, "")) is None


def test_freeze_reads_the_script_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "slurm_script"
    script.write_text("#!/bin/bash\n#SBATCH --signal=USR2@120\n")
    shell = SimpleNamespace(cmdline=lambda: ["/bin/bash", str(script), "+strategy=dp"])
    monkeypatch.setattr(batch.psutil, "Process", lambda: SimpleNamespace(parents=lambda: [shell]))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    run = RunDirectory(tmp_path)
    batch.check_signal(Config(elastic=ElasticConfig(stop_grace_s=121)), run)
    assert "may take 121 s: elastic.stop_grace_s" in capsys.readouterr().err
    batch.check_signal(Config(elastic=ElasticConfig(stop_grace_s=100)), run)
    assert capsys.readouterr().err == ""
    script.write_text("#!/bin/bash\n#SBATCH --signal=B:TERM@120\n")
    with pytest.raises(UserError, match="--signal=B:TERM@120 sends TERM to the batch script alone"):
        batch.check_signal(Config(elastic=ElasticConfig(stop_grace_s=100)), run)


def test_the_components_of_a_heterogeneous_job_are_refused(
    called: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.conftest.environment", lambda: {**os.environ, "SLURM_HET_SIZE": "2"})
    done = called("freeze", "+strategy=dp", "run.name=run")
    assert done.returncode == 2
    assert "a heterogeneous job of 2 components, but a run uses only the nodes of the first" in done.stderr
    done = called("freeze", *TWO_KINDS, ROLES % "judge: {command: ls")
    assert "a heterogeneous job of 2 components, but the roles need 1\n" in done.stderr
    assert not (tmp_path / "outputs").exists()


JUDGE = "judge: {command: [ls], per: node, gpus: 0, cpus: 2, mem: 300M, partition: small"
ROLES = "+run.roles={trainer: {command: [ls], nodes: 2}, %s}}"
TWO_KINDS = ("cluster=slurm", "cluster.gpus_per_node=0", "cluster.mem=8G", "cluster.nodes=3", "run.name=run")


def test_roles_with_different_resources_are_components(called: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = called("script", *TWO_KINDS, ROLES % JUDGE).stdout
    first, second = (re.findall(r"#SBATCH --(\S+)", part) for part in script.split("#SBATCH hetjob\n"))
    assert {"nodes=2", "mem=8G"} < set(first)
    assert {"partition=small", "nodes=1", "cpus-per-task=2", "mem=300M"} < set(second)
    assert script.count("-m hpc_train agent") == 2 and script.count("--het-group=1 ") == 1
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.mem=null", "the memory of some roles is set"),
        ("cluster.nodes=4", "the roles need 3 nodes (trainer 2, judge 1), but the job has 4"),
    ],
)
def test_what_components_cannot_have(
    override: str, words: str, called: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = called("script", *TWO_KINDS, ROLES % JUDGE, override)
    assert done.returncode == 2 and words in done.stderr


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
SETTINGS = dict.fromkeys(["partition", "account", "qos", "constraint", "exclude", "nodelist", "comment"], "x")


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


def every_script(job: Job) -> list[str]:
    """Returns all kinds of batch scripts of a job."""
    config, run = job.config, job.run.path
    container = container_of(config, job.gpus)
    asked = {**options(job), **identity([job], run, str(run / "out"))}
    code = FrozenCode(str(run), str(run), (str(run / "code"),), None, None)
    title = f"hpc_train, {config.strategy.name}: {job.layout}"
    submitted = Script(title, config.cluster, one_run(run), (), code, run / "chain", container, ["note"])
    printed = Script(title, config.cluster, freezing(config.cluster, job.overrides, container), [asked])
    array = Script(title, config.cluster, run_of_task(run / "listing"), ())
    arguments(asked)
    return [
        *map(render, (submitted, printed, array)),
        command_job._script(["checkpoint", "verify", str(run)], config, run / "code", None),
        command_job._script(["checkpoint", "release"], config, run / "code", ["serve", *job.overrides]),
        command_job._script(["bench", "step", *job.overrides], config, run / "code", None, job),
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


def with_value(job: Job, path: tuple[str, ...], value: str) -> Job:
    return dataclasses.replace(job, config=replaced(job.config, path, value))


def replaced(node: Any, path: tuple[str, ...], value: str) -> Any:
    """Returns a copy of a node of a config with ``value`` at ``path``; an empty name is replaced by the value."""
    if not path:
        return value
    name, *rest = path
    if isinstance(node, dict):
        return node | {name or value: value}
    return dataclasses.replace(node, **{name: replaced(getattr(node, name), tuple(rest), value)})


def tried(job: Job) -> list[str]:
    """Returns the lines of the job's script; none if it is refused."""
    try:
        return "".join(every_script(job)).splitlines()
    except UserError as error:
        assert error.where and error.fix
        return []


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr("hpc_train.launch.script.srun_has_pyxis", lambda: False)
    cluster = ClusterConfig(kind="slurm", cpu_workers=2, **SETTINGS)  # type: ignore[arg-type]
    cluster.container.image = "docker://image"
    return make_job(tmp_path / "sweep", cluster=cluster)


def check_lines(base: list[str], lines: list[str], payload: str) -> None:
    """Asserts that the script with ``payload`` is the one with a harmless value, but for the value."""
    assert len(lines) == len(base), f"{payload!r} adds a line"
    for before, after in zip(base, lines, strict=True):
        if before.startswith("export HPC_TRAIN_EXPORTED=") and after.rpartition("=")[2].isalnum():
            continue  # a digest of the values
        assert before == after or HARMLESS in before, f"{payload!r} changes {before!r} to {after!r}"
        if before != after and not after.startswith("# ") and payload.isprintable():
            expected, words = (shlex.split(line.removesuffix(" \\")) for line in (before, after))
            assert words == [word.replace(HARMLESS, payload) for word in expected], after


def test_no_value_of_any_key_becomes_a_line_of_a_script(job: Job) -> None:
    paths = list(strings(job.config))
    assert len(paths) > 60 and ("cluster", "env", "NAME") in paths and ("strategy", "name") in paths
    without = tried(job)
    in_scripts = {path: base for path in paths if (base := tried(with_value(job, path, HARMLESS))) != without and base}
    assert len(in_scripts) > 15
    for path, base in in_scripts.items():
        for payload in PAYLOADS:
            if lines := tried(with_value(job, path, payload)):
                check_lines(base, lines, payload)


def test_no_override_becomes_a_line_of_a_script(job: Job) -> None:
    base, *others = (tried(dataclasses.replace(job, overrides=(f"a={value}",))) for value in (HARMLESS, *PAYLOADS))
    for payload, lines in zip(PAYLOADS, others, strict=True):
        assert lines or "\0" in payload or not payload.isascii()
        if lines:
            check_lines(base, lines, payload)


@pytest.mark.parametrize("change", [("strategy", "name"), ("cluster", "env", "NAME"), ("cluster", "env", "")])
def test_nothing_of_a_value_is_executed(job: Job, change: tuple[str, ...], tmp_path: Path) -> None:
    """The lines of the scripts up to the step of the container are run one after the other."""
    heads = []
    for payload in PAYLOADS:
        with contextlib.suppress(UserError):
            heads.append(every_script(with_value(job, change, payload))[0].partition("\n\n# what the container")[0])
    assert heads or change[-1] == ""
    text = "\n".join(heads).encode("utf-8", "surrogateescape")
    done = subprocess.run(["bash"], input=text, cwd=tmp_path, capture_output=True, check=False)
    assert b"syntax error" not in done.stderr and b"unexpected EOF" not in done.stderr
    assert not (tmp_path / "CANARY").exists()


@pytest.mark.parametrize("line", ["export A=1\r", "a\0b"])
def test_what_sbatch_refuses_in_setup_is_refused_before(job: Job, line: str) -> None:
    job.config.cluster.setup.append(line)
    with pytest.raises(UserError, match=r"cluster\.setup"):
        every_script(job)


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

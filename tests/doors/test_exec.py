"""``exec`` runs a program as torchrun does: its options, the words after ``--``, and what the program gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_train
from hpc_train.commands.exec import overrides_of, parse
from hpc_train.config.values import command_text, command_words
from hpc_train.elastic.decision import Ended, History, RestartDecision, decide
from hpc_train.errors import UserError
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Action, Exit, Failure
from tests.config.composing import config_of
from tests.doors.command import environment

ODD = [
    "a=b",
    "c d",
    "$HOME",
    "${x}",
    "",
    "???",
    "it's",
    'ü"',
    "#x",
    "new\nline",
    "back\\",
    "a,b",
    "[1]",
    "--json",
    "--",
]
PROGRAM = """
import json, os, sys, time
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_MAX_RESTARTS")
seen = {name: os.environ[name] for name in names} | {"words": sys.argv[2:]}
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("these words", flush=True)
Path(f"{seen['RANK']}.new").write_text(json.dumps(seen))
Path(f"{seen['RANK']}.new").rename(f"seen-{count}-{seen['RANK']}.json")
while len(list(Path().glob(f"seen-{count}-*"))) < int(seen["WORLD_SIZE"]):
    time.sleep(0.05)  # all processes are killed when one ends
sys.exit(int(sys.argv[1]))
"""


def run_exec(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpc_train", "exec", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("words", [ODD, ["python", "-c", "print('a')"], ["$" * 3 + "{{${a}${b:c}"]])
def test_the_words_of_a_command_survive_the_config(words: list[str]) -> None:
    overrides = overrides_of(parse(["--standalone", "--per", "node", "--", *words])[0], words)
    config = config_of(*overrides)
    assert command_words(config.run.command) == words
    assert "${" not in command_text(words)


def test_options_become_config_keys() -> None:
    line = "--nnodes=2:4 --nproc_per_node=3 --max_restarts 5 --hang-timeout 7.5 --name x -m -p gpu --time 1:00:00"
    line += " --gpus-per-node a100:3 --set elastic.spares=1 --detach -- python train.py -m"
    options, words = parse(line.split())
    assert words == ("python", "train.py", "-m")
    assert (options.nnodes, options.nproc_per_node, options.gpus_per_node) == ((2, 4), 3, ("a100", 3))
    found = overrides_of(parse(["--standalone", "--per", "node", "--nnodes", "2-4", "--", "a"])[0], ["a"])
    assert {"run.per='node'", "cluster.nodes='2-4'", "elastic.min_nodes=2", "cluster=local"} <= set(found)


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["--nproc-per-node=2", "train.py", "--lr=1"], "must follow --", "-- python train.py --lr=1"),
        (["--nproc", "2", "python", "x.py"], "must follow --", "exec --nproc 2 -- python x.py"),
        (["-m", "-p", "gpu", "torchrun", "x.py"], "must follow --", "exec -m -p gpu -- torchrun x.py"),
        (["--standalone", "./x.sh"], "must follow --", "exec --standalone -- ./x.sh"),
        (["--"], "no command after --", "-- python"),
        (["--rdzv_backend=c10d", "--", "a"], "no option --rdzv-backend", "find each other"),
        (["--nnodes=0", "--", "a"], "--nnodes does not accept 0", "from 1"),
        (["--nproc-per-node=all", "--", "a"], "does not accept all", "auto"),
        (["--per=node", "--nproc-per-node=2", "--", "a"], "one process per node", "leave out one"),
        (["--partition=gpu", "--", "a"], "--partition has no effect without -m", "-m submits"),
        (["--max-restart=1", "--", "a"], "unrecognized arguments", "--max-restarts"),
    ],
)
def test_wrong_options_are_refused_with_the_fix(arguments: list[str], what: str, fix: str) -> None:
    with pytest.raises(UserError) as error:
        parse(arguments)
    assert what in error.value.what
    assert fix in error.value.fix


def test_a_limit_of_restarts_counts_every_failure_but_a_refusal() -> None:
    history = History(furthest=0, restarts_left=2)
    for _ in range(2):
        assert decide(history, Ended(Exit.FAILED, Failure.USER_ERROR, 0)) == RestartDecision(Action.RESTART)
        history = history.after(0)
    last = decide(history, Ended(Exit.FAILED, Failure.KILLED, 5))
    assert (last.action, "elastic.max_restarts" in last.reason) == (Action.GIVE_UP, True)
    assert decide(History(0, restarts_left=2), Ended(Exit.FAILED, Failure.REFUSED, 0)).action is Action.REFUSE


def test_a_program_gets_its_words_and_ranks_and_its_exit_code_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run_exec(
        tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=1", "--name=x", "--", "python", "program.py",
        "7", *ODD,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stderr.splitlines()[0].startswith("run x: output in ")
    assert "a script without checkpoints starts over" in done.stderr.splitlines()[0]
    assert "[0] these words\n" in done.stdout
    seen = [json.loads((tmp_path / f"seen-1-{rank}.json").read_text()) for rank in range(2)]
    assert [one["words"] for one in seen] == [ODD, ODD]
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in seen] == [
        ("0", "2", "2"),
        ("1", "2", "2"),
    ]
    assert seen[0]["TORCHELASTIC_MAX_RESTARTS"] == "1"
    assert not (tmp_path / "seen-2-0.json").exists()
    (end,) = (event for event in RunDirectory(tmp_path / "outputs" / "x").read_events() if "exit_code" in event)
    assert (end.exit_code, end["command_exit_code"]) == (Exit.GAVE_UP, 7)


SILENT = """
import os, subprocess, sys, time
print("begins", flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    subprocess.run(["sleep", "1000"])
"""


def test_silence_is_a_hang_with_a_bound_and_the_processes_are_shown(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    done = run_exec(
        tmp_path, "--standalone", "--per=node", "--hang-timeout=2", "--name=x", "--", "python", "silent.py"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "outputs" / "x")
    (hang,) = (event for event in run.read_events() if event.name == "hang_detected")
    assert "no sign of life for 2." in hang.message and "after step" not in hang.message
    (stacks,) = (run.logs / "stacks").glob("hang-*")
    text = stacks.read_text()
    assert "silent.py\n  thread " in text and ": sleep 1000\n  thread " in text
    assert "(silent.py:" in text or "py-spy is not installed" in text


def test_a_heartbeat_is_a_file_and_nothing_outside_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPC_TRAIN_PROGRESS", raising=False)
    hpc_train.heartbeat(3)
    monkeypatch.setenv("HPC_TRAIN_PROGRESS", str(tmp_path / "progress"))
    hpc_train.heartbeat(3)
    assert (tmp_path / "progress").read_text() == "3"
    code = "import sys, hpc_train; hpc_train.heartbeat(); sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0

"""Roles: processes of different kinds in one job start in order, restart alone or together, and end with the first."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.commands.exec import parse
from hpc_train.config.arguments import override_value
from hpc_train.config.roles import NodeGroup, check_roles, config_of_node, configs_of_roles, place, roles_of
from hpc_train.config.values import command_words
from hpc_train.errors import UserError
from tests.config.composing import config_of
from tests.train.custom_loop.runs import failures, frozen, run_agent

# answers with its restart count; dies on the first request, as ROLE_TEST_FAULT says
JUDGE = """
import os, signal, socket, sys
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("listens", flush=True)
server = socket.create_server(("", int(os.environ["HPC_TRAIN_ROLE_JUDGE_PORT"])))
while True:
    connection, _ = server.accept()
    if not connection.recv(1):
        continue
    if sys.argv[1] == "kill" and count == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "exit":
        sys.exit(3)
    connection.sendall(count.encode())
    connection.close()
"""
# asks the judge until its answer is the first argument
TRAINER = """
import json, os, socket, sys, time
from pathlib import Path
names = ("HPC_TRAIN_ROLE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME")
Path(sys.argv[2], "seen-" + os.environ["RANK"]).write_text(json.dumps({name: os.environ[name] for name in names}))
address = os.environ["HPC_TRAIN_ROLE_JUDGE_ADDRESS"], int(os.environ["HPC_TRAIN_ROLE_JUDGE_PORT"])
while True:
    try:
        with socket.create_connection(address) as connection:
            connection.sendall(b"?")
            if connection.recv(1) == sys.argv[1].encode():
                break
    except OSError:
        pass
    time.sleep(0.05)
"""


def roles(**values: dict[str, Any]) -> str:
    return f"+run.roles={override_value(values)}"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "trainer.py").write_text(TRAINER)
    return tmp_path


def example(scripts: Path, answer: str, fault: str, **of_judge: object) -> str:
    trainer = {"command": ["python", f"{scripts}/trainer.py", answer, str(scripts)], "procs": 2, "gpus": 0}
    judge = {"command": ["python", f"{scripts}/judge.py", fault], "per": "node", "gpus": 0}
    return roles(trainer=trainer, judge=judge | of_judge)


def test_a_server_that_is_killed_restarts_alone(tmp_path: Path, scripts: Path) -> None:
    run = frozen(tmp_path / "run", example(scripts, "1", "kill", ready="port"))
    code, error = run_agent(run)
    assert code == 0, error
    trainer, judge = run.of_role("trainer"), run.of_role("judge")
    assert [role.path.name for role in run.roles] == ["judge", "trainer"]
    assert failures(judge) == [("killed", 0)]
    assert failures(trainer) == failures(run) == []
    assert [directory.newest_attempt() for directory in (run, trainer, judge)] == [0, 0, 1]
    assert json.loads((tmp_path / "seen-1").read_text()) == {
        "HPC_TRAIN_ROLE": "trainer", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "ROLE_NAME": "trainer",
    }  # fmt: skip
    ends = {directory.path.name: directory.read_events()[-1] for directory in (trainer, judge)}
    assert {name: end.name for name, end in ends.items()} == {"trainer": "finished", "judge": "stopped"}
    (log,) = run.logs.glob("*-000.log")
    lines = [line.partition("] ")[2] for line in log.read_text().splitlines()]
    ready = next(number for number, line in enumerate(lines) if line.startswith("role judge is ready"))
    assert lines.index("judge: listens") < lines.index(f"starting role trainer on {ends['trainer'].node}")
    assert ready < lines.index(f"starting role trainer on {ends['trainer'].node}")


@pytest.mark.long_form(20)  # the restart of one role above, and the end below, take the same way
def test_all_roles_start_again_until_the_limit(tmp_path: Path, scripts: Path) -> None:
    case = example(scripts, "1", "exit", ready="output:listens", on_failure="restart_all")
    run = frozen(tmp_path / "run", case, "elastic.max_restarts=1")
    code, error = run_agent(run)
    assert code == 1, error
    assert [run.of_role(name).newest_attempt() for name in ("trainer", "judge")] == [1, 1]
    end = run.read_events()[-1]
    assert (end.failure, end["command_exit_code"]) == ("role_failed", 3)
    assert end.message.startswith("role judge failed with exit code 3: rank 0 on ")


@pytest.mark.long_form(20, cases=["never ready"])  # the other case takes the same way
@pytest.mark.parametrize("fault", ["port in use", "never ready"])
def test_a_role_that_cannot_serve_ends_the_run(tmp_path: Path, scripts: Path, fault: str) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ready = f"port:{port}" if fault == "port in use" else "output:nothing of this kind"
        run = frozen(tmp_path / "run", example(scripts, "0", "", ready=ready), "elastic.start_timeout_s=2")
        code, error = run_agent(run)
    assert code == 1
    assert failures(run) == [("role_failed", 0)]
    words = f"port {port} of " if fault == "port in use" else "role judge is not ready after "
    assert words in error
    assert not run.of_role("trainer").attempt_record(0)


COMMAND = {"command": "python -c pass"}


@pytest.mark.parametrize(
    ("values", "nodes", "words"),
    [
        ({"judge": {}}, 1, "the role judge has no command"),
        ({"Judge": COMMAND}, 1, "'Judge' cannot name a role"),
        ({"judge": COMMAND | {"node": 2}}, 1, "run.roles.judge.node is unknown"),
        ({"judge": COMMAND | {"nodes": 0}}, 1, "run.roles.judge.nodes is 0"),
        ({"judge": COMMAND | {"cpus": 0}}, 1, "run.roles.judge.cpus is 0"),
        ({"judge": COMMAND | {"per": "cpu"}}, 1, "run.roles.judge.per is 'cpu'"),
        ({"judge": COMMAND | {"ready": "port:x"}}, 1, "run.roles.judge.ready is 'port:x'"),
        ({"judge": COMMAND | {"after": ["trainer"]}}, 1, "after names trainer"),
        ({"a": COMMAND | {"after": ["b"]}, "b": COMMAND | {"after": ["a"]}}, 2, "roles a, b wait for each other"),
        ({"a": COMMAND, "b": COMMAND | {"nodes": 2}}, 2, r"the roles need 3 nodes \(a 1, b 2\), but the job has 2"),
        ({"a": COMMAND | {"gpus": 3}}, 1, "needs 3 GPUs of a node, but a node of the job has 2"),
        ({"a": COMMAND | {"procs": 3}}, 1, "has procs, but one process per GPU"),
        ({"a": {"command": []}}, 1, "no command"),
    ],
)
def test_mistakes_in_roles_are_refused(values: dict[str, Any], nodes: int, words: str) -> None:
    config = config_of()
    with pytest.raises(UserError, match=words):
        check_roles(replace(config, run=replace(config.run, roles=values)), [NodeGroup(nodes, 2)], nodes)


@pytest.mark.parametrize(
    "other", ["run.command=ls", "cluster.nodes=1-2", "elastic.min_nodes=1", "elastic.spares=1", "elastic.grow=offered"]
)
def test_settings_that_do_not_go_with_roles_are_refused(other: str) -> None:
    with pytest.raises(UserError, match=r"both set|are fixed"):
        check_roles(config_of(roles(a=COMMAND), other), [NodeGroup(2, 0)], 2)


def test_a_heterogeneous_job_is_one_job() -> None:
    values = roles(a=COMMAND, b=COMMAND | {"partition": "small"})
    for other in ("launch.chain=2", "cluster.first=[{partition: b}]"):
        with pytest.raises(UserError, match="cannot be one of several jobs"):
            check_roles(config_of(values, other), [NodeGroup(1, 0), NodeGroup(1, 0)], 2)


def test_roles_take_whole_nodes_or_share_them() -> None:
    half = COMMAND | {"gpus": 2}
    config = config_of(roles(a=COMMAND | {"nodes": 2}, b=half | {"nodes": 2}, c=half, d=COMMAND | {"gpus": 0}))
    placed = place(config, [NodeGroup(4, 4)])
    assert {name: [*placement.nodes] for name, placement in placed.items()} == {
        "a": [0, 1], "b": [2, 3], "c": [2], "d": [0],
    }  # fmt: skip
    assert [*placed["b"].gpus[0]] == [0, 1]
    assert [*placed["c"].gpus[0]] == [2, 3]
    assert {role.name: role.after for role in roles_of(config)} == {
        "a": ("b", "c", "d"), "b": (), "c": ("b",), "d": ("b", "c"),
    }  # fmt: skip


def test_roles_with_the_same_resources_share_a_component() -> None:
    small = COMMAND | {"partition": "small", "gpus": 1, "mem": 8000}
    values = roles(a=COMMAND | {"nodes": 2}, b=small, c=COMMAND | {"gpus": 0}, d=small)
    config = config_of(values, "cluster.gpus_per_node=4", "cluster.constraint=rack1")
    placed = place(config, [NodeGroup(2, 4), NodeGroup(1, 2)])
    assert {name: [*placement.nodes] for name, placement in placed.items()} == {
        "a": [0, 1],
        "b": [2],
        "c": [0],
        "d": [2],
    }
    assert [*placed["d"].gpus[0]] == [1]
    kinds = [config_of_node(config, (2, 1), node).cluster for node in range(3)]
    assert [(kind.partition, kind.gpus_per_node, kind.constraint, kind.mem) for kind in kinds] == [
        (None, 4, "rack1", None), (None, 4, "rack1", None), ("small", 2, None, "8000"),
    ]  # fmt: skip
    assert config_of_node(config, (), 0) == config, "on one machine the roles share it"
    assert place(config, [NodeGroup(3, 4)])["b"].nodes == (2,)


def test_exec_has_the_same_roles() -> None:
    judge_words = ["--role", "judge:per=node,after=none,ready=port:80", "--", "serve", "--", "$X"]
    options, _ = parse(["--role", "trainer:nodes=2", "--", "python", "a b.py", "--role", "x", *judge_words])
    config = config_of(roles(**options.roles))
    trainer, judge = roles_of(config)
    assert parse(["--role", "router:gpus=0", "--", "route"])[0].roles["router"]["procs"] == 1
    assert trainer.command == ("python", "a b.py", "--role", "x")
    assert judge.command == ("serve", "--", "$X")
    assert (trainer.nodes, judge.per, judge.after, judge.fixed_port) == (2, "node", (), 80)
    trainer_config, judge_config = configs_of_roles(config).values()
    assert (trainer_config.elastic.max_restarts, judge_config.elastic.max_restarts) == (None, 3)
    assert (judge_config.cluster.nodes, command_words(judge_config.run.command)) == (1, ["serve", "--", "$X"])
    for wrong in (
        ["--role", "a", "--"],
        ["--role", "a:x", "--", "c"],
        ["--role", "a", "--", "c", "--role", "a", "--", "c"],
    ):
        with pytest.raises(UserError):
            parse(wrong)

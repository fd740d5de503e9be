"""Names of nodes, the address at which nodes meet, and processes that a launcher has misplaced."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpc_train import cli
from hpc_train.errors import UserError
from hpc_train.machine.allocation import (
    LOOPBACK,
    Allocation,
    current_allocation,
    expand,
    listening_at,
    meeting_at,
    refuse_misplaced,
)
from hpc_train.run.directory import RunDirectory
from tests.doors.command import TINY, environment, hpc_train


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,07],login", "n1 n2 n3 n07 login"),
        ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
        ("r[1-2]c[3,5]-ib", "r1c3-ib r1c5-ib r2c3-ib r2c5-ib"),
    ],
)
def test_expand(text: str, names: str) -> None:
    assert expand(text) == names.split()


NODE = Allocation(2, 0, "jwb0001.juwels", "7", "7.0.0", "jwb0001.juwels")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interfaces, and a name service that knows one other name of the node."""

    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    found = {
        "lo": [address("127.0.0.1")],
        "eth0": [address("10.0.0.1")],
        "ib0": [address("fe80::1", socket.AF_INET6), address("10.1.0.1")],
        "ib1": [address("fe80::2", socket.AF_INET6)],
    }

    def resolve(name: str) -> str:
        if name != "jwb0001i":
            raise socket.gaierror(-2, "Name or service not known")
        return "10.1.0.1"

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(socket, "gethostbyname", resolve)


@pytest.mark.usefixtures("network")
def test_the_address_where_nodes_meet() -> None:
    assert meeting_at(NODE, None) == NODE
    assert meeting_at(NODE, "ib0").address == "10.1.0.1"
    assert meeting_at(NODE, "{host}i").address == "jwb0001i"
    alone = Allocation(1, 0, "n1", None, "n1.1", LOOPBACK)
    assert meeting_at(alone, "ib0") == alone, "a single node needs no network"


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("interface", "what", "fix"),
    [
        ("ib7", "jwb0001.juwels has no such interface with an IPv4 address, only eth0, ib0", "cluster.interface=eth0"),
        ("ib1", "has no such interface with an IPv4 address", "cluster.interface=eth0"),
        ("lo", "has no such interface with an IPv4 address", "cluster.interface=eth0"),
        ("{host}-ib0", "the host name jwb0001-ib0 does not resolve: Name or service not known", "getent hosts"),
    ],
)
def test_an_interface_or_name_that_does_not_exist(interface: str, what: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        meeting_at(NODE, interface)
    assert what in str(refused.value) and fix in str(refused.value) and "cluster.interface" in str(refused.value)


def test_the_nodes_of_a_heterogeneous_job_are_in_the_order_of_its_components() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2,5]"}
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n5", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]"}
    found = current_allocation({**step, **lists, "SLURM_HET_SIZE": "2", "SLURMD_NODENAME": "n1"})
    assert (found.node_names, found.component_sizes) == (("n5", "n1", "n2"), (1, 2))
    assert current_allocation(step).component_sizes == ()


def batch_host(address: str, other: str = LOOPBACK) -> Allocation:
    return Allocation(2, 0, "n1", "7", "7.0.0", address, ("n1", other))


def test_the_batch_host_listens_on_the_address_from_which_it_sends_to_the_others() -> None:
    """All of 127.0.0.0/8 is on this machine, and the kernel sends to it from 127.0.0.1."""
    found, doubt = listening_at(batch_host("localhost"), is_chosen=False)
    assert (found.listen_address, found.address, doubt) == (LOOPBACK, LOOPBACK, None)


def test_a_single_node_stays_on_loopback() -> None:
    alone = current_allocation({})
    assert alone.listen_address == LOOPBACK
    assert listening_at(alone, is_chosen=True) == (alone, None)


@pytest.mark.parametrize(
    ("here", "doubt"),
    [
        (batch_host("127.0.0.3"), "its name belongs to 127.0.0.3, but it sends to 127.0.0.1 from 127.0.0.1"),
        (batch_host("203.0.113.7"), "203.0.113.7 resolves to 203.0.113.7, which no interface of this node has"),
        (batch_host(LOOPBACK, "no name"), "there is no route to no name: "),
        (batch_host("no name"), "no name does not resolve on this node: "),
    ],
    ids=["another network", "not here", "no route", "no name"],
)
def test_the_batch_host_listens_on_all_interfaces_in_doubt(here: Allocation, doubt: str) -> None:
    for is_chosen in (False, True):
        if is_chosen and here.address == LOOPBACK:
            continue
        found, said = listening_at(here, is_chosen)
        assert found == here and found.listen_address == ""
        assert said is not None and said.startswith(doubt)


def test_a_name_with_several_addresses_leaves_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in ("10.0.0.1", "10.1.0.1", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answers)
    assert listening_at(batch_host("n1"), is_chosen=True)[1] == "n1 has the addresses 10.0.0.1, 10.1.0.1"


def test_the_chosen_address_needs_no_route_to_the_names_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the nodes may belong to another network than ``cluster.interface``."""
    monkeypatch.setattr("hpc_train.machine.allocation._LOOPBACK_NET", "none")
    chosen = batch_host("127.0.0.3", "no name")
    assert listening_at(chosen, is_chosen=True)[0].listen_address == "127.0.0.3"
    assert listening_at(chosen, is_chosen=False)[0].listen_address == ""


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "variables",
    [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, {"WORLD_SIZE": "2"}],
)
def test_one_process_per_node_is_right(variables: dict[str, str]) -> None:
    refuse_misplaced(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1"},
        TORCHRUN | {"RANK": "1", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_the_others_leave_without_a_word(variables: dict[str, str]) -> None:
    with pytest.raises(SystemExit) as end:
        refuse_misplaced(variables)
    assert end.value.code == 2


def test_variables_that_something_else_has_left_are_named_whatever_the_rank() -> None:
    with pytest.raises(UserError, match="left over from another program: unset RANK"):
        refuse_misplaced(TORCHRUN | {"RANK": "3"})


def test_a_config_for_a_step_of_several_nodes_is_refused(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    done = hpc_train("+strategy=dp", *TINY, cwd=tmp_path, env=environment(**step))
    assert done.returncode == 2
    assert 'srun python -m hpc_train agent "$RUN"' in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_alone_goes_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/doors`` shows that the agent trains a frozen run."""
    called: list[list[str]] = []
    monkeypatch.setattr("hpc_train.commands.agent.start_agent", lambda arguments, begun: called.append(arguments) or 7)
    RunDirectory(tmp_path).config.touch()
    assert cli.run([str(tmp_path)]) == 7
    assert called == [[str(tmp_path)]]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["+strategy=dp", *TINY], TORCHRUN, "torchrun"),
        (["agent", "."], {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}, "--ntasks-per-node=1"),
    ],
)
def test_the_first_says_why(tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str) -> None:
    done = hpc_train(*arguments, cwd=tmp_path, env=environment(**variables))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

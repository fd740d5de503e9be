"""What other sites' tools have printed, in each form in which it comes, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hpc_train.machine.network.facts import NodeFacts, format_cpu_list
from hpc_train.machine.network.rails import judge_ports, match, port_warnings
from hpc_train.machine.network.rank_binding import cpu_masks
from hpc_train.machine.network.rdma import parse_rdma_text
from hpc_train.machine.network.smi import parse_matrix
from tests.machine.network.printed import MATRICES, TABS, Printed


@pytest.mark.parametrize("printed", MATRICES.values(), ids=MATRICES.keys())
def test_matrices(printed: Printed) -> None:
    facts = parse_matrix(printed.text)
    assert " ".join(format_cpu_list(mask.cpus or ()) or "-" for mask in cpu_masks(facts)) == printed.masks
    assert " ".join(matched.nic or "-" for matched in match(facts)) == printed.cards
    ways = {f"{link.a}-{link.b}={link.path_type}" for link in facts.links}
    assert set(printed.links.split()) <= ways
    count = len(facts.gpus) + len(facts.nics)
    assert len(ways) == count * (count - 1) // 2 - printed.unknown.startswith("GPU0 and")
    assert [note for note in facts.unknown if printed.unknown in note] if printed.unknown else not facts.unknown


@pytest.mark.parametrize("printed", MATRICES.values(), ids=MATRICES.keys())
def test_what_terminals_and_launchers_add_changes_nothing(printed: Printed) -> None:
    lines = printed.text.splitlines()
    for text in (
        "\r\n".join(lines),
        "\n".join(["\x1b[4m" + lines[0] + "\x1b[0m", *lines[1:]]),
        "\n".join(f"0: {line}" for line in lines),
        "\n".join(f"# {line}" for line in lines),
        "\n".join(["$ nvidia-smi topo -m", *lines]).rstrip(),
        "\n".join([lines[0].lstrip("\t"), *lines[1:]]) if not printed.spaces else printed.text,
    ):
        assert parse_matrix(text) == parse_matrix(printed.text)


@pytest.mark.parametrize("printed", [one for one in MATRICES.values() if one.columns == TABS])
def test_a_copy_that_ends_somewhere_says_less_and_nothing_else(printed: Printed) -> None:
    whole = parse_matrix(printed.text)
    known = {gpu.index: gpu for gpu in whole.gpus}
    for end in range(0, len(printed.text), 3):
        cut = parse_matrix(printed.text[:end])
        for gpu in cut.gpus:
            assert gpu.cpus in ((), known[gpu.index].cpus) and gpu.numa_nodes in ((), known[gpu.index].numa_nodes)


@dataclass(frozen=True)
class Text:
    """What a tool printed. ``ports``: ``name:port state layer rate verdict`` of each; ``warns``: words of a warning."""

    text: str
    ports: tuple[str, ...]
    warns: str = ""


def ibstat(*cards: tuple[str, str, str]) -> str:
    """``cards``: name, type and the ports as ``Active LinkUp 400 InfiniBand``, several with a comma between."""
    lines = []
    for name, card, ports in cards:
        lines += [f"CA '{name}'", f"\tCA type: {card}", f"\tNumber of ports: {len(ports.split(','))}", "\tFirmware: 28"]
        for number, port in enumerate(ports.split(","), start=1):
            state, physical, rate, layer = port.split()
            lines += [
                f"\tPort {number}:",
                f"\t\tState: {state}",
                f"\t\tPhysical state: {physical}",
                f"\t\tRate: {rate}",
            ]
            lines += ["\t\tBase lid: 75", "\t\tSM lid: 3", f"\t\tLink layer: {layer}"]
    return "\n".join(lines) + "\n"


def ibstatus(*cards: str, indent: str = "\t") -> str:
    """``cards``: ``name state physical rate layer``."""
    lines = []
    for card in cards:
        name, state, physical, rate, layer = card.split()
        lines += [f"Infiniband device '{name}' port 1 status:", f"{indent}default gid:\t fe80:0000::11eb"]
        lines += [
            f"{indent}state:\t\t {state.replace('=', ': ')}",
            f"{indent}phys state:\t {physical.replace('=', ': ')}",
        ]
        lines += [f"{indent}rate:\t\t {rate} Gb/sec (4X EDR)", f"{indent}link_layer:\t {layer}", ""]
    return "\n".join(lines)


def devinfo(*cards: tuple[str, int, str]) -> str:
    """``cards``: name, part and the ports as ``PORT_ACTIVE(4) Ethernet``, several with a comma between."""
    lines = []
    for name, part, ports in cards:
        lines += [
            f"hca_id:\t{name}",
            "\ttransport:\t\t\tInfiniBand (0)",
            f"\tvendor_part_id:\t\t\t{part}",
            "\tDevice ports:",
        ]
        for number, port in enumerate(ports.split(","), start=1):
            state, layer = port.replace("(", " (").rsplit(maxsplit=1)
            lines += [f"\t\tport:\t{number}", f"\t\t\tstate:\t\t\t{state}", f"\t\t\tlink_layer:\t\t{layer}", ""]
    return "\n".join(lines)


NDR, STORAGE = "Active LinkUp 400 InfiniBand", "Active LinkUp 100 Ethernet"
TEXTS = {
    "rails with Ethernet for storage between them, in the order of strings": Text(
        ibstat(("mlx5_0", "MT4129", NDR), ("mlx5_1", "MT4125", STORAGE), ("mlx5_10", "MT4129", NDR),
               ("mlx5_2", "MT4129", NDR)),
        ("mlx5_0:1 ACTIVE InfiniBand 400 used", "mlx5_1:1 ACTIVE Ethernet 100 left out",
         "mlx5_2:1 ACTIVE InfiniBand 400 used", "mlx5_10:1 ACTIVE InfiniBand 400 used"),
    ),
    "one card with InfiniBand beside a pair of slower Ethernet ports": Text(
        ibstat(("mlx5_0", "MT4123", "Active LinkUp 200 InfiniBand"), ("mlx5_1", "MT4117", "Active LinkUp 25 Ethernet"),
               ("mlx5_2", "MT4117", "Active LinkUp 25 Ethernet")),
        ("mlx5_0:1 ACTIVE InfiniBand 200 used", "mlx5_1:1 ACTIVE Ethernet 25 left out",
         "mlx5_2:1 ACTIVE Ethernet 25 left out"),
    ),
    "RoCE on all cards, slower ones for storage": Text(
        ibstat(("mlx5_0", "MT4129", "Active LinkUp 400 Ethernet"), ("mlx5_1", "MT4125", STORAGE),
               ("mlx5_2", "MT4129", "Active LinkUp 400 Ethernet")),
        ("mlx5_0:1 ACTIVE Ethernet 400 used", "mlx5_1:1 ACTIVE Ethernet 100 left out",
         "mlx5_2:1 ACTIVE Ethernet 400 used"),
    ),
    "rails, and one faster port for storage": Text(
        ibstat(*((f"mlx5_{i}", "MT4123", "Active LinkUp 200 InfiniBand") for i in range(4)), ("mlx5_4", "MT4129", NDR)),
        (*(f"mlx5_{i}:1 ACTIVE InfiniBand 200 used" for i in range(4)), "mlx5_4:1 ACTIVE InfiniBand 400 left out"),
    ),
    "a cable that is not there": Text(
        ibstat(("mlx5_0", "MT4129", NDR), ("mlx5_1", "MT4129", "Down Polling 40 InfiniBand")),
        ("mlx5_0:1 ACTIVE InfiniBand 400 used", "mlx5_1:1 DOWN InfiniBand 40 left out"), "mlx5_1 port 1 is polling",
    ),
    "a port that somebody has turned off": Text(
        ibstat(("mlx5_0", "MT4129", NDR), ("mlx5_1", "MT4129", "Down Disabled 10 InfiniBand")),
        ("mlx5_0:1 ACTIVE InfiniBand 400 used", "mlx5_1:1 DOWN InfiniBand 10 left out"),
    ),
    "no subnet manager": Text(
        ibstat(("mlx5_0", "MT4123", "Initializing LinkUp 200 InfiniBand")),
        ("mlx5_0:1 INIT InfiniBand 200 left out",), "mlx5_0 port 1 is INIT: no subnet manager",
    ),
    "a cable for 200 Gb/s on a card for 400": Text(
        ibstat(("mlx5_0", "MT4129", "Active LinkUp 200 InfiniBand")),
        ("mlx5_0:1 ACTIVE InfiniBand 200 used",), "runs at 200 Gb/s, but its NIC supports 400",
    ),
    "two ports of which one is for Ethernet": Text(
        ibstat(("mlx5_0", "MT4123", f"Active LinkUp 200 InfiniBand,{STORAGE}")),
        ("mlx5_0:1 ACTIVE InfiniBand 200 used", "mlx5_0:2 ACTIVE Ethernet 100 left out"),
    ),
    "a tool that stops at a card that is gone": Text(
        ibstat(("mlx5_0", "MT4124", NDR)) + "ibpanic: [77] main: stat of IB device 'mlx5_8' failed: No such file\n",
        ("mlx5_0:1 ACTIVE InfiniBand 400 used",),
    ),
    "one card that was asked for, with its encoding behind the rate": Text(
        "CA: 'mlx4_0'\nPort 1:\nState: Active\nPhysical state: LinkUp\nRate: 40 (FDR10)\nLink layer: InfiniBand\n",
        ("mlx4_0:1 ACTIVE InfiniBand 40 used",),
    ),
    "ibstat that is cut off": Text(
        ibstat(("mlx5_0", "MT4129", NDR), ("mlx5_1", "MT4129", NDR))[:-60],
        ("mlx5_0:1 ACTIVE InfiniBand 400 used", "mlx5_1:1 ACTIVE None None unknown"),
    ),
    "ibstatus": Text(
        ibstatus("mlx5_0 4=ACTIVE 5=LinkUp 100 InfiniBand", "mlx5_2 1=DOWN 3=Disabled 10 InfiniBand"),
        ("mlx5_0:1 ACTIVE InfiniBand 100 used", "mlx5_2:1 DOWN InfiniBand 10 left out"),
    ),
    "ibstatus with spaces": Text(
        ibstatus("mlx5_0 4=ACTIVE 5=LinkUp 200 InfiniBand", "mlx5_8 4=ACTIVE 5=LinkUp 40 Ethernet", indent=" " * 8),
        ("mlx5_0:1 ACTIVE InfiniBand 200 used", "mlx5_8:1 ACTIVE Ethernet 40 left out"),
    ),
    "ibv_devinfo, cards by their place": Text(
        devinfo(("rocep1s0f0", 4129, "PORT_DOWN(1) Ethernet"), ("roceP2p1s0f1", 4129, "PORT_ACTIVE(4) Ethernet")),
        ("roceP2p1s0f1:1 ACTIVE Ethernet None used", "rocep1s0f0:1 DOWN Ethernet None left out"),
    ),
    "ibv_devinfo, two ports": Text(
        devinfo(("mlx4_0", 4099, "PORT_ACTIVE(4) Ethernet,PORT_ACTIVE(4) Ethernet")),
        ("mlx4_0:1 ACTIVE Ethernet None used", "mlx4_0:2 ACTIVE Ethernet None used"),
    ),
    "ibv_devinfo -v": Text(
        devinfo(("mlx5_0", 4129, "PORT_ACTIVE(4) InfiniBand")) + "\t\t\tphys_state:\t\tLINK_UP (5)\n",
        ("mlx5_0:1 ACTIVE InfiniBand None used",),
    ),
    "InfiniBand without IP, which ibdev2netdev calls Down": Text(
        "mlx5_0  port  1  ==>  ibp26s0  (Down)\nmlx5_1  port  1  ==>  enp27s0f0np0  (Up)\n", (),
    ),
    "no NIC": Text("ibpanic: [12] main: no IB devices found\n", ()),
}  # fmt: skip


@pytest.mark.parametrize("recorded", TEXTS.values(), ids=TEXTS.keys())
def test_texts_about_ports(recorded: Text) -> None:
    facts = NodeFacts(nics=parse_rdma_text(recorded.text))
    reported = []
    for verdict in judge_ports(facts):
        port, usable = verdict.port, {True: "used", False: "left out", None: "unknown"}[verdict.usable]
        rate = None if port.rate_gbps is None else f"{port.rate_gbps:g}"
        reported.append(f"{verdict.nic}:{port.number} {port.state} {port.link_layer} {rate} {usable}")
    assert tuple(reported) == recorded.ports
    warned = [warning for warning in port_warnings(facts) if recorded.warns in warning]
    assert warned if recorded.warns else not warned


def test_a_network_interface_that_is_down_says_nothing_of_its_port() -> None:
    healthy = parse_rdma_text(TEXTS["InfiniBand without IP, which ibdev2netdev calls Down"].text)
    assert [nic.interfaces for nic in healthy] == [("ibp26s0",), ("enp27s0f0np0",)]

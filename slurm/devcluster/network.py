"""Names and networks of the nodes.

By default all nodes are this machine, and their names stand in /etc/hosts. With ``--network`` each node is a network
namespace on one bridge, with an address and a hosts file of its own: what its jobs send crosses a link that can be cut
or slowed. Names and addresses follow from the cluster's port, so that several clusters stand side by side.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from daemons import NODES, PORTS, Cluster, Refused, call

HOSTS = Path("/etc/hosts")
MARK = "# hpc_train devcluster in "


def subnet(cluster: Cluster) -> str:
    """The first three numbers of the addresses, 10.64.0 and up."""
    block = cluster.port // PORTS
    return f"10.{64 + block // 256}.{block % 256}"


def node_address(cluster: Cluster, index: int) -> str:
    return f"{subnet(cluster)}.{index + 1}" if cluster.network else "127.0.0.1"


def controller_address(cluster: Cluster) -> str:
    return f"{subnet(cluster)}.254" if cluster.network else "127.0.0.1"


def bridge(cluster: Cluster) -> str:
    return f"dc{cluster.port}"


def namespace(cluster: Cluster, node: str) -> str:
    """The network namespace of a node, and the name of its link's end on the bridge (15 characters at most)."""
    return f"{bridge(cluster)}-{node}"


def write_hosts(cluster: Cluster) -> None:
    """Node names must resolve: in /etc/hosts where it can be written; inside a namespace in a file of its own."""
    lines = [f"{node_address(cluster, index)} {node}" for index, node in enumerate(NODES)]
    if cluster.network:
        own = ["127.0.0.1 localhost", *lines, f"{controller_address(cluster)} {host()}"]
        (cluster.state / "etc" / "hosts").write_text("\n".join(own) + "\n")
    elif os.access(HOSTS, os.W_OK):
        _edit_hosts(cluster, [f"{line} {MARK}{cluster.state}" for line in lines])


def forget_hosts(cluster: Cluster) -> None:
    if os.access(HOSTS, os.W_OK) and MARK in HOSTS.read_text():
        _edit_hosts(cluster, [])


def _edit_hosts(cluster: Cluster, own: list[str]) -> None:
    """Replaces the lines of this cluster, and drops those of clusters whose state directory is gone."""
    with HOSTS.open("r+") as file:  # in place: it may be a mount point
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = file.read().splitlines()
        text = "\n".join([*(line for line in lines if _is_others(line, cluster)), *own]) + "\n"
        file.seek(0)
        file.write(text)
        file.truncate()


def _is_others(line: str, cluster: Cluster) -> bool:
    _, mark, state = line.partition(MARK)
    return not mark or (Path(state) != cluster.state and Path(state).exists())


def host() -> str:
    return socket.gethostname().split(".")[0]


def make_network(cluster: Cluster) -> None:
    """The bridge with the controller's address, and a namespace per node.

    Raises:
        Refused: this kernel or container does not let us.
    """
    name = bridge(cluster)
    if not Path("/sys/class/net", name).exists():
        made = call(cluster, "ip", "link", "add", name, "type", "bridge", check=False)
        if made.returncode:
            raise Refused(f"no bridge can be made here, which --network needs: {made.stderr.strip()}")
        call(cluster, "ip", "addr", "add", f"{controller_address(cluster)}/24", "dev", name)
        call(cluster, "ip", "link", "set", name, "up")
    for index, node in enumerate(NODES):
        if not Path("/run/netns", namespace(cluster, node)).exists():
            _make_namespace(cluster, node, node_address(cluster, index))


def _make_namespace(cluster: Cluster, node: str, address: str) -> None:
    own = namespace(cluster, node)
    call(cluster, "ip", "netns", "add", own)
    call(cluster, "ip", "link", "add", own, "type", "veth", "peer", "name", "eth0", "netns", own)
    call(cluster, "ip", "link", "set", own, "master", bridge(cluster), "up")
    call(cluster, "ip", "-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        call(cluster, "ip", "-n", own, "link", "set", device, "up")


def inside(cluster: Cluster, node: str, command: str) -> list[str]:
    """``command`` in the namespace of ``node``, with its host name.

    Not by ``ip netns exec``: that mounts /sys anew, and slurmd loses its cgroups.
    """
    own = f"mount --bind {cluster.state}/etc/hosts /etc/hosts; hostname {node}; exec {command}"
    enter = ["nsenter", f"--net=/run/netns/{namespace(cluster, node)}", "unshare", "--uts", "--mount"]
    return [*enter, "sh", "-c", own]


def set_link(cluster: Cluster, node: str, how: str) -> None:
    """Cuts the link of ``node`` (``cut``), makes it ``whole`` again, or slows it to a rate of tc, as ``200mbit``."""
    device = namespace(cluster, node)
    if not cluster.network:
        raise Refused("the nodes of this cluster have no network of their own; start it with --network")
    call(cluster, "ip", "link", "set", device, "down" if how == "cut" else "up")
    # the end on the bridge slows what the node receives, its own end what it sends
    for place in (["tc"], ["tc", "-n", device]):
        link = device if len(place) == 1 else "eth0"
        call(cluster, *place, "qdisc", "del", "dev", link, "root", check=False)
        if how not in ("cut", "whole"):
            bucket = ["burst", "64kb", "latency", "100ms"]
            call(cluster, *place, "qdisc", "add", "dev", link, "root", "tbf", "rate", how, *bucket)


def remove_network(cluster: Cluster) -> None:
    for node in NODES:
        if Path("/run/netns", namespace(cluster, node)).exists():
            call(cluster, "ip", "netns", "del", namespace(cluster, node), check=False)
    if Path("/sys/class/net", bridge(cluster)).exists():
        call(cluster, "ip", "link", "del", bridge(cluster), check=False)

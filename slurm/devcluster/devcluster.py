#!/usr/bin/env python3
"""A real Slurm of four nodes on this machine, to try the toolkit and to test it.

    devcluster.py up [--network] [--no-accounting]    start what is not running yet; ready in seconds
    devcluster.py env                                 print the exports that make it the current cluster
    devcluster.py down                                stop exactly what was started, leave nothing

Everything lies under one state directory (``--state``, default ``$TMPDIR/hpc_train-devcluster-$UID``). With
``--network`` (root) each node gets a network namespace with an address of its own, so that jobs cross a network that
can be cut or slowed. Needs Debian's or Ubuntu's packages; says which are missing, or installs them with
``SLURM_INSTALL=1``. Standard library only: it runs before any environment is made.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
CPUS, MEMORY_MB, GPUS = 4, 4000, 4  # of each node, as declared to Slurm
SUBNET = "10.77.0"  # of the network namespaces
PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
}
TEMPLATES = Path(__file__).parent / "etc"


class Refused(Exception):
    """The cluster cannot or must not be started here (exit code 2)."""


class Failed(Exception):
    """Something that should have started did not (exit code 1)."""


@dataclass(frozen=True)
class Cluster:
    """Where the cluster lives and which parts it has."""

    state: Path
    network: bool = False
    accounting: bool = True
    port: int = 26000  # +1 controller, +2 database, +3 or +11… nodes

    @property
    def conf(self) -> Path:
        return self.state / "etc" / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def pid_file(self, name: str) -> Path:
        return self.state / "run" / f"{name}.pid"


def main() -> int:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "down", "env"])
    default = Path(tempfile.gettempdir()) / f"hpc_train-devcluster-{os.getuid()}"
    parser.add_argument("--state", type=Path, default=default, help="state directory (default: %(default)s)")
    parser.add_argument("--network", action="store_true", help="one network namespace per node (root)")
    parser.add_argument("--no-accounting", action="store_true", help="no slurmdbd, as on some sites")
    parser.add_argument("--port", type=int, default=26000, help="first of 20 ports (default: %(default)s)")
    options = parser.parse_args()
    cluster = Cluster(options.state.resolve(), options.network, not options.no_accounting, options.port)
    try:
        {"up": up, "down": down, "env": env}[options.command](cluster)
    except Refused as reason:
        print(f"devcluster: {reason}", file=sys.stderr)
        return 2
    except Failed as reason:
        print(f"devcluster: {reason}", file=sys.stderr)
        return 1
    return 0


def env(cluster: Cluster) -> None:
    if not cluster.conf.exists():
        raise Refused("no cluster was started; run: make slurm-up")
    print(f"export SLURM_CONF={shlex.quote(str(cluster.conf))}")
    if "/usr/sbin" not in os.environ.get("PATH", "").split(":")[:-2]:
        print("export PATH=$PATH:/usr/sbin:/sbin")


# ---- up ------------------------------------------------------------------------------------------------------------


def up(cluster: Cluster) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr)

    check_machine(cluster)
    check_packages(cluster)
    write_state(cluster)
    start_munge(cluster)
    if cluster.accounting:
        start_database(cluster)
        say("accounting is up")
    run_daemon(cluster, "slurmctld", ["slurmctld"])
    wait_for("slurmctld", lambda: answers(cluster, "scontrol", "ping"), 20)
    for node in NODES:
        start_node(cluster, node)
    call(cluster, "scontrol", "update", f"nodename={node_list()}", "state=resume", check=False)
    wait_for("all nodes to be idle", lambda: ready_nodes(cluster) == len(NODES), 30)
    say(f"{len(NODES)} nodes are ready")
    print(f"export SLURM_CONF={shlex.quote(str(cluster.conf))}")


def check_machine(cluster: Cluster) -> None:
    """A machine that belongs to a cluster is left alone."""
    if cluster.network and os.geteuid() != 0:
        raise Refused("--network needs root, to make network namespaces")
    for path in ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf"):
        if Path(path).exists():
            raise Refused(f"this machine belongs to a cluster already: {path} exists")
    if Path("/run/munge/munge.socket.2").exists() and answers(None, "munge", "-n"):
        raise Refused("a munge daemon with a key in use runs on this machine: it belongs to a cluster already")
    if os.environ.get("SLURM_CONF", str(cluster.conf)) != str(cluster.conf) and answers(None, "scontrol", "ping"):
        raise Refused(f"a Slurm controller answers already (SLURM_CONF={os.environ['SLURM_CONF']})")


def check_packages(cluster: Cluster) -> None:
    optional = set() if cluster.accounting else {"slurmdbd", "mariadbd"}
    missing = sorted({package for tool, package in PACKAGES.items() if tool not in optional and not shutil.which(tool)})
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.environ.get("SLURM_INSTALL") != "1":
        raise Refused(
            f"missing packages; install them with: {shlex.join(install)}   (or SLURM_INSTALL=1 make slurm-up)"
        )
    quiet = {"stdout": sys.stderr, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update", "-qq"], check=True, **quiet)  # type: ignore[call-overload]
    subprocess.run([*install, "-qq"], check=True, **quiet)  # type: ignore[call-overload]


def write_state(cluster: Cluster) -> None:
    for folder in ("etc", "run", "log", "spool/slurmctld", "dev", *(f"spool/{node}" for node in NODES)):
        (cluster.state / folder).mkdir(parents=True, exist_ok=True)
    values = {
        "state": cluster.state,
        "host": socket.gethostname().split(".")[0],
        "user": getpass.getuser(),
        "controller_address": f"{SUBNET}.254" if cluster.network else "127.0.0.1",
        "controller_port": cluster.port + 1,
        "database_port": cluster.port + 2,
        "node_list": node_list(),
    }
    accounting = (TEMPLATES / "accounting.conf").read_text().format(**values)
    values["accounting"] = accounting if cluster.accounting else "AccountingStorageType=accounting_storage/none"
    values["nodes"] = "\n".join(node_line(cluster, index) for index in range(len(NODES)))
    for template in ("slurm.conf", "slurmdbd.conf", "my.cnf", "init.sql", "topology.conf"):
        path = cluster.state / "etc" / template
        path.write_text((TEMPLATES / template).read_text().format(**values))
        path.chmod(0o600 if template == "slurmdbd.conf" else 0o644)
    (cluster.state / "etc" / "gres.conf").write_text(f"NodeName={node_list()} Name=gpu File={gpu_files(cluster)}\n")
    write_hosts(cluster)


def node_list() -> str:
    return f"n[1-{len(NODES)}]"


def node_line(cluster: Cluster, index: int) -> str:
    node, host = NODES[index], socket.gethostname().split(".")[0]
    where = (
        f"NodeHostname={node} NodeAddr={SUBNET}.{index + 1} Port={cluster.port + 3}"
        if cluster.network
        else f"NodeHostname={host} NodeAddr=127.0.0.1 Port={cluster.port + 11 + index}"
    )
    feature = f"rack{1 + index // 2},{'a100' if index % 2 == 0 else 'h100'}"
    return f"NodeName={node} {where} CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS} Feature={feature} State=UNKNOWN"


def gpu_files(cluster: Cluster) -> str:
    """GPUs are declared as character devices: without them Slurm sets no CUDA_VISIBLE_DEVICES."""
    try:
        for index in range(GPUS):
            path = cluster.state / "dev" / f"gpu{index}"
            if not path.exists():
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
        return f"{cluster.state}/dev/gpu[0-{GPUS - 1}]"
    except PermissionError:
        return f"/dev/tty[0-{GPUS - 1}]"


def write_hosts(cluster: Cluster) -> None:
    """Node names must resolve: in /etc/hosts where it can be written, and in each namespace's own file."""
    addresses = {node: f"{SUBNET}.{i + 1}" if cluster.network else "127.0.0.1" for i, node in enumerate(NODES)}
    lines = [f"{address} {node} {hosts_mark(cluster)}" for node, address in addresses.items()]
    hosts = Path("/etc/hosts")
    if os.access(hosts, os.W_OK):
        hosts.write_text("\n".join([*other_hosts(hosts, cluster), *lines]) + "\n")
    if cluster.network:
        own = ["127.0.0.1 localhost", *lines, f"{SUBNET}.254 {socket.gethostname().split('.')[0]}"]
        (cluster.state / "etc" / "hosts").write_text("\n".join(own) + "\n")


def other_hosts(hosts: Path, cluster: Cluster) -> list[str]:
    return [line for line in hosts.read_text().splitlines() if not line.endswith(hosts_mark(cluster))]


def hosts_mark(cluster: Cluster) -> str:
    """What tells the lines of this cluster from those of others that run beside it."""
    return f"# hpc_train devcluster in {cluster.state}"


def start_munge(cluster: Cluster) -> None:
    key, run = cluster.state / "etc" / "munge.key", cluster.state / "run"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
    command = ["munged", f"--key-file={key}", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid"]
    command += [f"--log-file={cluster.state}/log/munged.log", f"--seed-file={cluster.state}/etc/munge.seed"]
    if not alive(cluster, "munged"):
        for stale in run.glob("munge.socket*"):
            stale.unlink()
    run_daemon(cluster, "munged", command)
    wait_for("munged", lambda: answers(cluster, "munge", "-n", "-S", f"{run}/munge.socket"), 5)


def start_database(cluster: Cluster) -> None:
    config, user = f"--defaults-file={cluster.state}/etc/my.cnf", getpass.getuser()
    if not (cluster.state / "mysql" / "mysql").exists():
        root = ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}", f"--user={user}"]
        call(cluster, "mariadb-install-db", config, *root, "--skip-test-db")
    if not alive(cluster, "mariadbd"):
        with (cluster.state / "log" / "mariadbd.out").open("a") as log:
            command = ["mariadbd", config, f"--user={user}"]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    wait_for("mariadbd", lambda: answers(cluster, "mariadb-admin", config, "ping"), 30)
    os.environ["MYSQL_UNIX_PORT"] = str(cluster.state / "run" / "mysqld.sock")
    run_daemon(cluster, "slurmdbd", ["slurmdbd"])
    wait_for("slurmdbd", lambda: answers(cluster, "sacctmgr", "-n", "list", "cluster"), 30)
    call(cluster, "sacctmgr", "-iQ", "add", "cluster", "devcluster", check=False)
    call(cluster, "sacctmgr", "-iQ", "add", "account", "research", "Cluster=devcluster", check=False)
    call(cluster, "sacctmgr", "-iQ", "add", "user", user, "account=research", "DefaultAccount=research", check=False)


def start_node(cluster: Cluster, node: str) -> None:
    command = ["slurmd", "-N", node]
    if cluster.network:
        make_namespace(cluster, node)
        # not `ip netns exec`: it remounts /sys, and slurmd loses its cgroups
        inside = f"mount --bind {cluster.state}/etc/hosts /etc/hosts; hostname {node}; exec slurmd -N {node}"
        command = ["nsenter", f"--net=/run/netns/{node}", "unshare", "--uts", "--mount", "sh", "-c", inside]
    run_daemon(cluster, f"slurmd-{node}", command)


def make_namespace(cluster: Cluster, node: str) -> None:
    def ip(*arguments: str) -> None:
        call(cluster, "ip", *arguments)

    if not Path("/sys/class/net/slurmbr0").exists():
        ip("link", "add", "slurmbr0", "type", "bridge")
        ip("addr", "add", f"{SUBNET}.254/24", "dev", "slurmbr0")
        ip("link", "set", "slurmbr0", "up")
    if Path(f"/run/netns/{node}").exists():
        return
    ip("netns", "add", node)
    ip("link", "add", f"ve-{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
    ip("link", "set", f"ve-{node}", "master", "slurmbr0", "up")
    ip("-n", node, "addr", "add", f"{SUBNET}.{NODES.index(node) + 1}/24", "dev", "eth0")
    ip("-n", node, "link", "set", "eth0", "up")
    ip("-n", node, "link", "set", "lo", "up")


def ready_nodes(cluster: Cluster) -> int:
    done = call(cluster, "sinfo", "-h", "-N", "-p", "gpu", "-t", "idle,mixed,allocated", "-o", "%N", check=False)
    return len(set(done.stdout.split()))


# ---- down ----------------------------------------------------------------------------------------------------------


def down(cluster: Cluster) -> None:
    """Jobs first, so that no task is left behind; then the daemons, each by its pid file; then the state directory."""
    if not cluster.state.exists():
        return
    if cluster.conf.exists() and answers(cluster, "scontrol", "ping"):
        call(cluster, "scancel", "--me", check=False)
        wait_for("jobs to end", lambda: not call(cluster, "squeue", "-h", check=False).stdout.strip(), 15, must=False)
    for node in NODES:
        stop(cluster, f"slurmd-{node}")
    kill_stray_steps(cluster)
    for daemon in ("slurmctld", "slurmdbd", "mariadbd", "munged"):
        stop(cluster, daemon)
    remove_network(cluster)
    hosts = Path("/etc/hosts")
    if os.access(hosts, os.W_OK) and len(other_hosts(hosts, cluster)) < len(hosts.read_text().splitlines()):
        hosts.write_text("\n".join(other_hosts(hosts, cluster)) + "\n")
    shutil.rmtree(cluster.state)


def stop(cluster: Cluster, name: str) -> None:
    if not alive(cluster, name):
        return
    pid = int(cluster.pid_file(name).read_text())
    os.kill(pid, signal.SIGTERM)
    if not wait_for(f"{name} to stop", lambda: not Path(f"/proc/{pid}").exists(), 15, must=False):
        os.kill(pid, signal.SIGKILL)


def kill_stray_steps(cluster: Cluster) -> None:
    """Step daemons that outlived their slurmd, known by the SLURM_CONF in their environment."""
    mark = f"SLURM_CONF={cluster.conf}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "comm").read_text().startswith("slurmstepd") and mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def remove_network(cluster: Cluster) -> None:
    if not Path("/sys/class/net/slurmbr0").exists():
        return
    for node in NODES:
        call(cluster, "ip", "netns", "del", node, check=False)
    call(cluster, "ip", "link", "del", "slurmbr0", check=False)


# ---- processes -----------------------------------------------------------------------------------------------------


def alive(cluster: Cluster, name: str) -> bool:
    """Whether the daemon of this pid file runs (and the pid was not given to somebody else)."""
    try:
        pid = int(cluster.pid_file(name).read_text())
        return name.partition("-")[0].encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def run_daemon(cluster: Cluster, name: str, command: list[str]) -> None:
    """Starts a program that goes to the background by itself, unless it runs."""
    if alive(cluster, name):
        return
    done = call(cluster, *command, check=False)
    if done.returncode:
        log = cluster.state / "log" / f"{name}.log"
        tail = "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else done.stderr
        raise Failed(f"{name} did not start:\n{tail}")


def call(cluster: Cluster, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A command with the cluster's configuration; one that hangs on a dead daemon is ended after 60 s."""
    done = subprocess.run(
        command,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise Failed(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done


def answers(cluster: Cluster | None, *command: str) -> bool:
    environment = cluster.environment if cluster else dict(os.environ)
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=3, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def wait_for(what: str, done: Callable[[], bool], seconds: float, must: bool = True) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            if must:
                raise Failed(f"gave up waiting for {what}; the logs are in the state directory")
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A real Slurm on this machine, to try the toolkit and to test it: four nodes, and three more that declare GPUs.

    devcluster.py up [--network] [--no-accounting]    start what is not running yet; ready in seconds
    devcluster.py env                                 print the exports that make it the current cluster
    devcluster.py link n2 cut|whole|200mbit           cut, restore or slow a node's link (--network)
    devcluster.py down                                stop exactly what was started, leave nothing

Everything lies under one state directory (``--state``, default ``$TMPDIR/hpc_train-devcluster-$UID``), so that several
clusters, each with ports of its own (``--port``), stand side by side. It must belong to you, and nobody else may write
there. With ``--network`` (root) each node gets a network namespace with an address of its own, so that jobs cross a
network that can be cut or slowed. Needs Debian's or Ubuntu's packages; says which are missing, or installs them with
``SLURM_INSTALL=1``. Standard library only: it runs before any environment is made.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from daemons import (
    NODES,
    PORTS,
    Cluster,
    Failed,
    Refused,
    alive,
    answers,
    call,
    kill_strays,
    make_state,
    refuse_unsafe,
    run_daemon,
    stop,
    wait_for,
)
from gpus import GPUS, conf_of, remove_groups, task_plugin, write_gpus
from network import (
    controller_address,
    forget_hosts,
    host,
    inside,
    make_network,
    node_address,
    remove_network,
    set_link,
    write_hosts,
)

CPUS, MEMORY_MB = 4, 4000  # of each node, as declared to Slurm
PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
}
TWO_THREADS = "n7"  # the node whose cores have two threads each
TEMPLATES = Path(__file__).parent / "etc"


def main() -> int:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"up": up, "env": env, "down": down}
    parser.add_argument("command", choices=[*commands, "link"])
    parser.add_argument("link", nargs="*", metavar="NODE HOW", help="of link: n2 cut")
    default = Path(tempfile.gettempdir()) / f"hpc_train-devcluster-{os.getuid()}"
    parser.add_argument("--state", type=Path, default=default, help="state directory (default: %(default)s)")
    parser.add_argument("--network", action="store_true", help="one network namespace per node (root)")
    parser.add_argument("--no-accounting", action="store_true", help="no slurmdbd, as on some sites")
    parser.add_argument("--limit-memory", action="store_true", help="Slurm kills steps that exceed their memory")
    parser.add_argument("--port", type=int, default=26000, help="first of 20 ports (default: %(default)s)")
    options = parser.parse_args()
    parts = options.network, not options.no_accounting, options.port, options.limit_memory
    absolute = options.state.absolute()
    state = absolute.parent.resolve() / absolute.name  # a link at its place stays one and is refused
    asked = Cluster(state, *parts)
    try:
        refuse_unsafe(state)
        if options.command == "link":
            link(as_started(asked), *options.link)
        else:
            commands[options.command](as_started(asked))
    except Refused as reason:
        print(f"devcluster: {reason}", file=sys.stderr)
        return 2
    except Failed as reason:
        print(f"devcluster: {reason}", file=sys.stderr)
        return 1
    return 0


def as_started(asked: Cluster) -> Cluster:
    """The cluster of this state directory as it was started, whatever the command says now."""
    settings = settings_file(asked)
    return replace(asked, **json.loads(settings.read_text())) if settings.exists() else asked


def settings_file(cluster: Cluster) -> Path:
    return cluster.state / "etc" / "settings.json"


def link(cluster: Cluster, node: str = "", how: str = "") -> None:
    if node not in NODES or not how:
        raise Refused(f"link wants a node, one of {', '.join(NODES)}, and cut, whole or a rate: link n2 200mbit")
    set_link(cluster, node, how)


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
    if cluster.network:
        make_network(cluster)
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
    make_state(cluster.state)
    for folder in ("etc", "run", "log", "spool/slurmctld", "dev", *(f"spool/{node}" for node in NODES)):
        (cluster.state / folder).mkdir(parents=True, exist_ok=True)
    kept = {"network": cluster.network, "accounting": cluster.accounting, "port": cluster.port}
    kept["limit_memory"] = cluster.limit_memory
    settings_file(cluster).write_text(json.dumps(kept))
    values = {
        "state": cluster.state,
        "host": host(),
        "user": getpass.getuser(),
        "controller_address": controller_address(cluster),
        "controller_port": cluster.port + 1,
        "database_port": cluster.port + 2,
        "node_list": node_list(),
        "task_plugin": task_plugin(),
        "first_job": jobs_of(cluster).start,
        "memory": "JobAcctGatherParams=OverMemoryKill" if cluster.limit_memory else "",
        "sampling_s": 1 if cluster.limit_memory else 5,
    }
    accounting = (TEMPLATES / "accounting.conf").read_text().format(**values)
    values["accounting"] = accounting if cluster.accounting else "AccountingStorageType=accounting_storage/none"
    values["nodes"] = "\n".join(node_line(cluster, index) for index in range(len(NODES)))
    for template in ("slurm.conf", "slurmdbd.conf", "my.cnf", "init.sql", "topology.conf"):
        path = cluster.state / "etc" / template
        path.write_text((TEMPLATES / template).read_text().format(**values))
        path.chmod(0o600 if template == "slurmdbd.conf" else 0o644)
    write_gpus(cluster)
    write_hosts(cluster)


def jobs_of(cluster: Cluster) -> range:
    """The ids of its jobs. Those of other clusters differ, because control groups are named after jobs."""
    first = 1 + 10_000 * max(0, (cluster.port - 26000) // PORTS)
    return range(first, first + 10_000)


def node_list() -> str:
    return f"n[1-{len(NODES)}]"


def node_line(cluster: Cluster, index: int) -> str:
    node = NODES[index]
    name, port = (node, cluster.port + 3) if cluster.network else (host(), cluster.port + 11 + index)
    where = f"NodeHostname={name} NodeAddr={node_address(cluster, index)} Port={port}"
    own = f"Feature=rack{min(1 + index // 2, 3)}" + (f",gpu{GPUS[node][-1]} Gres={GPUS[node]}" if node in GPUS else "")
    threads = f" CoresPerSocket={CPUS // 2} ThreadsPerCore=2" if node == TWO_THREADS else ""
    return f"NodeName={node} {where} CPUs={CPUS}{threads} RealMemory={MEMORY_MB} {own} State=UNKNOWN"


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
    daemon = f"slurmd -N {node} -f {conf_of(cluster, node)}"
    run_daemon(cluster, f"slurmd-{node}", inside(cluster, node, daemon) if cluster.network else daemon.split())


def ready_nodes(cluster: Cluster) -> int:
    done = call(cluster, "sinfo", "-h", "-N", "-t", "idle,mixed,allocated", "-o", "%N", check=False)
    return len(set(done.stdout.split()))


# ---- down ----------------------------------------------------------------------------------------------------------


def down(cluster: Cluster) -> None:
    """Jobs first, so that no task is left behind; then the daemons, each by its pid file; then what is left."""
    if cluster.conf.exists() and answers(cluster, "scontrol", "ping"):
        jobs = call(cluster, "squeue", "-h", "-o", "%A", check=False).stdout.split()
        call(cluster, "scancel", *jobs, check=False)
        wait_for("jobs to end", lambda: not call(cluster, "squeue", "-h", check=False).stdout.strip(), 15, must=False)
    stop(cluster, "slurmctld", *(f"slurmd-{node}" for node in NODES))
    for daemon in ("slurmdbd", "mariadbd", "munged"):
        stop(cluster, daemon)
    kill_strays(cluster)
    remove_groups(jobs_of(cluster))
    remove_network(cluster)
    forget_hosts(cluster)
    if cluster.state.exists():
        shutil.rmtree(cluster.state)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m hpc_train init --site [FILE]`` describes the cluster of this login node in a file of settings.

It queries Slurm, the shell and the file systems, without root. Each value has a comment with its source; the values
that could not be found are listed at the end. ``config/settings.py`` describes the format of the file.
"""

from __future__ import annotations

import argparse
import difflib
import grp
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import yaml

from hpc_train.config.run_path import SCRATCH
from hpc_train.config.schema import ClusterConfig
from hpc_train.config.settings import SITE, SYSTEM_FILE
from hpc_train.errors import UserError
from hpc_train.launch.executors.cost import can_ask
from hpc_train.launch.gpus import asked_gpus
from hpc_train.machine.storage import file_system_of, room_in
from hpc_train.run.exits import Exit
from hpc_train.run.files import write_text
from hpc_train.schedulers.slurm.client import Controller, Query, SlurmError, find_controller, query, run
from hpc_train.schedulers.slurm.limits import FALLBACK_QOS
from hpc_train.schedulers.slurm.records import clock, number, rows, size_bytes, values_of
from hpc_train.schedulers.slurm.site import MIG, Association, NodeKind, Partition, PartitionLimits, Site, begin_site
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted

FILE = Path("site.yaml")
TIME_S = 3600  # the default of cluster.time
RUNTIMES = ("apptainer", "singularity", "enroot")
MODULES = re.compile(r"^(cuda|cudatoolkit|nvhpc|rocm|nccl|rccl|aws-ofi|apptainer|singularity|python)\b", re.IGNORECASE)
SHELL_S = 10.0  # time limit of a query of the module system
START_S = 120  # the time within which the job that tests the internet must start
HOST = "api.wandb.ai"
REACHES = f"curl -sS -o /dev/null -m 10 https://{HOST} || timeout 10 bash -c 'exec 3<>/dev/tcp/{HOST}/443'"


@dataclass(frozen=True)
class Value:
    """Describes a line of the file.

    Attributes:
        value: None if the line is only a suggestion, which ``source`` then describes.
        source: the command or file that says so.
    """

    key: str
    value: str | int | None
    source: str


@dataclass
class Survey:
    """Holds the findings about a cluster. ``missing`` holds sentences about the values that could not be found."""

    head: str
    values: list[Value] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, key: str, value: str | int | None, source: str) -> None:
        self.values.append(Value(key, value, source))

    def text(self) -> str:
        lines = [*_comment(self.head), "defaults:", "  - cluster: slurm"]
        for group in dict.fromkeys(value.key.partition(".")[0] for value in self.values):
            lines += ["", f"{group}:"] if any(item.value is not None for item in self._of(group)) else [""]
            for item in self._of(group):
                lines += _lines(item)
        if self.missing:
            lines += ["", "# Not found:", *(line for text in self.missing for line in _comment(f"- {text}"))]
        return "\n".join([*lines, "", *LIMITS.splitlines(), ""])

    def _of(self, group: str) -> list[Value]:
        return [value for value in self.values if value.key.startswith(f"{group}.")]


LIMITS = """\
# A site can also set limits, which no job may exceed and the command line cannot override:
# limits:
#   cluster.nodes: {max: 16}
#   cluster.partition: {one_of: [NAME, ...]}"""


def _lines(item: Value) -> list[str]:
    *tables, last = item.key.split(".")[1:]
    if item.value is None:
        return [f"  {line}" for line in _comment(f"{'.'.join([*tables, last])}: {item.source}")]
    nested = [f"{'  ' * depth}{table}:" for depth, table in enumerate(tables, start=1)]
    value = yaml.safe_dump([item.value], default_flow_style=True).strip()[1:-1]
    return [*(f"  {line}" for line in _comment(item.source)), *nested, f"{'  ' * (1 + len(tables))}{last}: {value}"]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent="# ", subsequent_indent="#   ", break_on_hyphens=False)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site",
        nargs="?",
        type=Path,
        const=FILE,
        metavar="FILE",
        help="on a login node: write the settings of the cluster, with their sources (default: site.yaml)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --site if it differs")
    parser.add_argument(
        "--internet",
        action="store_true",
        help="with --site: try in a job of 30 seconds whether nodes reach the internet",
    )


def init_site(file: Path, *, overwrite: bool, internet: bool, as_json: bool) -> int:
    """Writes the settings of this cluster to ``file``, or shows how they differ from those in it. Raises UserError if
    no Slurm controller responds here, or the file cannot be written.

    Args:
        overwrite: whether an existing file is replaced.
        internet: whether a job of at most 30 seconds tries whether compute nodes reach the internet.
        as_json: whether one JSON object is printed, with the file, the values, their sources, and what is missing.

    Returns:
        The exit code: 1 if the file exists and differs.
    """
    controller, said = find_controller()
    if controller is not Controller.UP:
        what = f"no Slurm cluster responds on this machine: {said}"
        raise UserError(what, where="init --site", fix="run it on a login node of the cluster")
    path = file.absolute()
    survey = examine(internet=internet)
    text = survey.text()
    old = path.read_text(encoding="utf-8") if path.exists() else None
    if old is not None and old != text:
        names = (str(path), "the cluster now")
        difference = difflib.unified_diff(old.splitlines(), text.splitlines(), *names, lineterm="")
        print("\n".join(difference), file=sys.stderr if as_json else sys.stdout)
        if not overwrite:
            print(f"{path} was not changed; --overwrite replaces it", file=sys.stderr)
            return Exit.FAILED
    if old != text:
        try:
            write_text(path, text, 0o644)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}", where="init --site", fix="init --site FILE") from error
    if as_json:
        values = [asdict(item) for item in survey.values]
        print(json.dumps({"file": str(path), "values": values, "missing": survey.missing}))
        return Exit.DONE
    verb = "is up to date" if old == text else "written"
    count = sum(item.value is not None for item in survey.values)
    print(f"{path} {verb}: {count} values with their sources; not found: {len(survey.missing)}")
    for line in survey.missing:
        print(f"  {line}")
    return _offer_check(path, survey)


def _offer_check(path: Path, survey: Survey) -> int:
    """Prints how to use the file, and at a terminal offers the check of a node."""
    check = "python -m hpc_train doctor --submit"
    print(f"use it:    export {SITE}={shlex.quote(str(path))}")
    print(f"           for all users: {SYSTEM_FILE}, owned by root; for you alone: ~/.config/hpc_train/user.yaml")
    print(f"then try:  {check}")
    console = Terminal()
    if can_ask(console) and console.input("submit this check of one node now? [y/N] ").strip().lower() in ("y", "yes"):
        return subprocess.run(
            [sys.executable, "-m", "hpc_train", *check.split()[3:]], env={**os.environ, SITE: str(path)}, check=False
        ).returncode
    return Exit.DONE


def examine(ask: Query = query, environment: Mapping[str, str] = os.environ, *, internet: bool = False) -> Survey:
    """Queries the cluster and this login node.

    Args:
        ask: runs a command; returns None if it fails.
        internet: see ``init_site``.
    """
    answers: dict[str, str] = {}

    def noted(command: Sequence[str]) -> str | None:
        answer = ask(command)
        answers[" ".join(command[:4])] = answer or ""
        return answer

    site = begin_site(noted)()
    config = dict(re.findall(r"^(\w+) *= *(.*?) *$", answers.get("scontrol show config", ""), re.MULTILINE))
    name = site.name or "(unnamed)"
    survey = Survey(
        f"The cluster {name} (Slurm {config.get('SLURM_VERSION', 'of an unknown version')}), as described by "
        "`python -m hpc_train init --site`. The comment above each value is its source. A project's own files and the "
        "command line take precedence over these values."
    )
    records = {
        values.get("PartitionName", ""): values
        for values in map(values_of, answers.get("scontrol --all show partition", "").splitlines())
    }
    hidden = {name for name, partition in site.partitions.items() if not partition.kinds}
    partitions = [
        partition if partition.kinds else _summed(partition, records[partition.name])
        for partition in site.partitions.values()
    ]
    site = replace(site, partitions={partition.name: partition for partition in partitions})
    usable = [partition for partition in site.partitions.values() if _may_use(partition, records, site)]
    chosen = max(usable, key=lambda partition: _preference(partition, records[partition.name]), default=None)
    if chosen is None:
        survey.missing.append("cluster.partition: `scontrol show partition` lists none that is up and that you may use")
    else:
        gres = "scontrol show partition TRES" if chosen.name in hidden else "sinfo %G"
        _add_partition(survey, chosen, usable, site, records[chosen.name], gres)
        limits = _add_account(survey, chosen, site, records[chosen.name], ask)
        _add_limits(survey, chosen, records[chosen.name], limits)
        _add_architecture(survey, chosen)
    _add_federation(survey, ask(["scontrol", "show", "federation"]) or "", site)
    _add_software(survey, ask, environment)
    _add_root(survey, environment)
    _add_internet(survey, chosen, _tried(chosen) if internet else None)
    survey.missing.append("cluster.price: Slurm knows no price; set per_gpu_hour and currency for the costs of runs")
    return survey


def _may_use(partition: Partition, records: Mapping[str, Mapping[str, str]], site: Site) -> bool:
    record = records.get(partition.name, {})
    groups = record.get("AllowGroups", "ALL")
    if partition.state != "UP" or record.get("RootOnly") == "YES":
        return False
    if groups not in ("ALL", "") and not set(groups.split(",")) & _own_groups():
        return False
    return not site.associations or bool(_accounts(partition, site, record))


def _own_groups() -> set[str]:
    names = set()
    for group in os.getgroups():
        try:
            names.add(grp.getgrgid(group).gr_name)
        except KeyError:
            continue
    return names


def _accounts(partition: Partition, site: Site, record: Mapping[str, str]) -> list[Association]:
    """Returns the caller's associations with which the partition may be used, the default account first."""
    denied = set(record.get("DenyAccounts", "").split(","))
    associations = [
        association
        for association in site.associations or ()
        if association.partition in (None, partition.name)
        and (partition.accounts is None or association.account in partition.accounts)
        and association.account not in denied
        and (partition.qos is None or association.qos & partition.qos)
    ]
    return sorted(associations, key=lambda association: not association.default)


def _summed(partition: Partition, record: Mapping[str, str]) -> Partition:
    """Returns a partition whose nodes Slurm does not show with one kind of nodes, by the sums over them; unchanged if
    the nodes cannot be alike.
    """
    tres = _tres(record)
    nodes = number(tres.get("node")) or 0
    types = {name.partition(":")[2]: number(count) or 0 for name, count in tres.items() if name.startswith("gres/gpu")}
    gpus = {name: count for name, count in types.items() if name} or types
    if not nodes or sum(gpus.values()) != types.get("") or any(count % nodes for count in gpus.values()):
        return partition
    cores = (number(tres.get("cpu")) or 0) // nodes
    memory_mb = size_bytes(tres.get("mem", "")) // nodes >> 20
    each = {name: count // nodes for name, count in gpus.items()}
    return replace(partition, kinds=(NodeKind(nodes, cores, memory_mb, each),))


def _tres(record: Mapping[str, str]) -> dict[str, str]:
    return dict(re.findall(r"([^,=]+)=([^,]+)", record.get("TRES", "")))


def _preference(partition: Partition, record: Mapping[str, str]) -> tuple[bool, int, bool, int]:
    """Prefers whole GPUs, many of them, then the default partition, then long jobs."""
    whole = sum(kind.count * (kind.gpus_of(None) - kind.slices_of(None)) for kind in partition.kinds)
    if not partition.kinds:
        whole = number(_tres(record).get("gres/gpu")) or 0
    return (whole > 0, whole, partition.default, partition.max_time_s or sys.maxsize)


def _add_partition(
    survey: Survey, chosen: Partition, usable: Sequence[Partition], site: Site, record: Mapping[str, str], source: str
) -> None:
    """Adds the partition and its GPUs, which ``source`` shows."""
    with_gpus = [kind for kind in chosen.kinds if kind.gpus]
    limit = "no time limit" if chosen.max_time_s is None else f"at most {clock(chosen.max_time_s)}"
    nodes = "" if chosen.max_nodes is None else f" and {counted(chosen.max_nodes, 'node', 'nodes')} per job"
    why = f"scontrol show partition: {counted(chosen.nodes, 'node', 'nodes')}, {limit}{nodes}"
    others = [f"{partition.name} ({_described(partition)})" for partition in usable if partition is not chosen]
    if others:
        why += f". Others that you may use: {_listed(others)}"
    survey.add("cluster.partition", chosen.name, why)
    if not with_gpus:
        tres = _tres(record)
        count = f"; it has {tres['gres/gpu']} on {tres.get('node')} nodes by its TRES" if "gres/gpu" in tres else ""
        survey.missing.append(
            f"GPUs: sinfo lists no GRES gpu on the nodes of {chosen.name} (sinfo --format=%R|%G){count}"
        )
        return
    counts: Counter[str] = Counter()
    for kind in with_gpus:
        for name in kind.gpus:
            counts[name] += kind.count
    whole = [name for name, _ in counts.most_common() if not MIG.search(name)]
    gpu_type = whole[0] if whole and whole[0] and len(counts) > 1 else None
    gres = _listed(sorted({_gres(kind) for kind in with_gpus}))
    if gpu_type is not None:
        types = ", ".join(
            f"{each or 'without a type'} on {counted(count, 'node', 'nodes')}" for each, count in counts.most_common()
        )
        survey.add("cluster.gpu_type", gpu_type, f"{source}: {types}; this is the most frequent type of whole GPUs")
    gpus = asked_gpus(ClusterConfig(partition=chosen.name, gpu_type=gpu_type), site)
    note = f". {gpus.note.removeprefix('note: ')}" if gpus.note else ""
    survey.add("cluster.gpus_per_node", gpus.count, f"{source}: {gres}{note}")
    if not any(counts):
        survey.missing.append(f"the type of the GPUs: {source} names none; cluster.machine names one for `plan`")
    features = sorted({feature for kind in with_gpus for feature in kind.features})
    if len({kind.features for kind in with_gpus}) > 1:
        survey.add("cluster.constraint", None, f"features of some of the nodes (sinfo %f): {_listed(features)}")
    if record.get("OverSubscribe", record.get("Shared", "")).startswith("EXCLUSIVE"):
        survey.add("cluster.exclusive", True, "scontrol show partition: OverSubscribe=EXCLUSIVE, only whole nodes")


def _gres(kind: NodeKind) -> str:
    each = ",".join(":".join(filter(None, ("gpu", name, str(count)))) for name, count in sorted(kind.gpus.items()))
    nodes = counted(kind.count, "node", "nodes")
    return f"{each} on {nodes} with {kind.cores} cores and {kind.memory_mb // 1024} GiB"


def _described(partition: Partition) -> str:
    gpus = sorted({_gres(kind).partition(" on ")[0] for kind in partition.kinds if kind.gpus})
    limit = "no limit" if partition.max_time_s is None else clock(partition.max_time_s)
    fewer = partition.max_nodes is not None and partition.max_nodes < partition.nodes
    per_job = f", at most {partition.max_nodes} per job" if fewer else ""
    return f"{counted(partition.nodes, 'node', 'nodes')}{per_job}, {' or '.join(gpus) or 'no GPUs'}, {limit}"


def _listed(items: Sequence[str], most: int = 8) -> str:
    more = f", ... ({len(items) - most} more)" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _add_account(
    survey: Survey, chosen: Partition, site: Site, record: Mapping[str, str], ask: Query
) -> list[tuple[str, PartitionLimits]]:
    """Adds the account and the QOS; returns the limits of jobs that use them, each with its source."""
    if site.associations is None:
        survey.missing.append("accounts and limits of accounts: sacctmgr does not respond; cluster.account if required")
        return []
    associations = _accounts(chosen, site, record)
    if not associations:
        needed = "associations" in site.enforced
        survey.missing.append(
            "cluster.account: sacctmgr lists no association of this user"
            + (", and AccountingStorageEnforce requires one: ask the site" if needed else "")
        )
        return []
    shares = rows(ask(["sshare", "-nP", "-U", "--format=Account,FairShare"]) or "", ("Account", "FairShare"))
    numbers = [row for row in shares if re.fullmatch(r"\d+(\.\d+)?", row["FairShare"] or "")]
    order = {row["Account"].strip(): float(row["FairShare"]) for row in numbers}
    associations.sort(key=lambda association: (not association.default, -order.get(association.account, 0)))
    names = _listed(list(dict.fromkeys(association.account for association in associations)))
    source = f"sacctmgr show assoc: {names}" + (" (ordered by sshare)" if order else "")
    used = associations[0]
    if used.default:
        why = f"jobs use your default account {used.account} without this key. {source}"
        survey.add("cluster.account", None, why)
    else:
        why = f"{source}; your default account cannot use {chosen.name}. In a file for all users, remove this line"
        survey.add("cluster.account", used.account, why)
    denied = set(record.get("DenyQos", "").split(","))
    allowed = sorted((used.qos if chosen.qos is None else used.qos & chosen.qos) - denied)
    default = used.default_qos or FALLBACK_QOS
    qos = default
    if allowed and default not in allowed:
        qos = allowed[0]
        why = f"sacctmgr show assoc, scontrol show partition: {_listed(allowed)}, without the default {default}"
        survey.add("cluster.qos", qos, why)
    elif len(allowed) > 1:
        survey.add("cluster.qos", None, f"the default is {default}; sacctmgr show assoc: {_listed(allowed)}")
    limits = [(f"sacctmgr show assoc, account {used.account}", used.limits)]
    known = site.qos or {}
    of_qos = [each for each in dict.fromkeys((qos, chosen.own_qos)) if each in known]
    return limits + [(f"sacctmgr show qos, {each}", known[each]) for each in of_qos if each is not None]


def _add_limits(
    survey: Survey, chosen: Partition, record: Mapping[str, str], limits: Sequence[tuple[str, PartitionLimits]]
) -> None:
    times = {f"scontrol show partition: MaxTime of {chosen.name}": chosen.max_time_s}
    times |= {f"{source}: MaxWall": limit.max_time_s for source, limit in limits}
    known = {source: time for source, time in times.items() if time is not None}
    source = min(known, key=lambda name: known[name], default="")
    if source and known[source] < TIME_S:
        survey.add("cluster.time", clock(known[source]), source)
    for source, limit in limits:
        counts = {"nodes per job": limit.max_nodes, "GPUs per job": limit.max_gpus, "in the queue": limit.max_jobs}
        words = [f"{count} {what}" for what, count in counts.items() if count is not None]
        if words:
            survey.add("cluster.nodes", None, f"{source}: limits of {', '.join(words)}")
    defaults = record.get("JobDefaults", "")
    if defaults not in ("", "(null)"):
        survey.add("cluster.cpus_per_gpu", None, f"auto uses the JobDefaults of {chosen.name}: {defaults}")


def _add_architecture(survey: Survey, chosen: Partition) -> None:
    here = platform.machine()
    if not chosen.architectures:
        survey.missing.append("the architecture of the nodes: `scontrol show node` names none")
    elif chosen.architectures != {here}:
        why = f"the nodes are {_listed(sorted(chosen.architectures))} (scontrol show node), and this machine is {here}"
        survey.add("cluster.python", None, f"the Python of an environment for the nodes: {why}")


def _add_federation(survey: Survey, text: str, site: Site) -> None:
    others = [name for name in re.findall(r"^Sibling: *([^:\s]+)", text, re.MULTILINE) if name != site.name]
    if others:
        why = f"the federation has {_listed(others)} (scontrol show federation); by default a job stays on {site.name}"
        survey.add("cluster.clusters", None, why)


def _add_software(survey: Survey, ask: Query, environment: Mapping[str, str]) -> None:
    runtimes = [name for name in RUNTIMES if shutil.which(name, path=environment.get("PATH"))]
    if "--container-image" in (ask(["srun", "--help"]) or ""):
        runtimes.append("pyxis (srun --help)")
    if runtimes:
        survey.add("cluster.container.image", None, f"FILE.sif or an image of a registry; here: {_listed(runtimes)}")
    else:
        survey.missing.append(f"a container runtime: none of {', '.join(RUNTIMES)} on PATH, and srun has no pyxis")
    modules = [name for name in _modules(environment) if MODULES.search(name)]
    if modules:
        survey.add("cluster.setup", None, f"[module load NAME]; module -t avail: {_listed(modules, 16)}")
    else:
        survey.missing.append("modules for GPUs or containers: `module -t avail` lists none (MODULEPATH)")


def _modules(environment: Mapping[str, str]) -> list[str]:
    if not environment.get("MODULEPATH"):
        return []
    try:
        command = ["bash", "-lc", "module -t avail 2>&1"]
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=SHELL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    names = (line.strip().removesuffix("(default)").rstrip("/") for line in done.stdout.splitlines())
    return [name for name in names if name and not name.endswith(":")]


def _add_root(survey: Survey, environment: Mapping[str, str]) -> None:
    user = environment.get("USER", "")
    places = [(f"${{oc.env:{name}}}", Path(environment[name]), f"${name}") for name in SCRATCH if environment.get(name)]
    for name in ("scratch", "work", "lustre") if user else ():
        places.append((f"/{name}/${{oc.env:USER}}", Path("/", name, user), f"/{name}/$USER"))
    for text, path, source in places:
        if path.is_dir() and os.access(path, os.W_OK):
            system = file_system_of(path)
            quota = " with a quota" if any(room.whose == "your quota" for room in room_in(path)) else ""
            kind = "" if system is None else f" ({system.kind}{quota})"
            survey.add("run.root", f"{text}/hpc_train", f"{source}, a directory that you may write{kind}")
            return
    survey.missing.append(
        "run.root: no scratch directory in $SCRATCH or similar, nor below /scratch, /work or /lustre; runs go to "
        "outputs/ in the working directory, which all nodes must see"
    )


def _tried(chosen: Partition | None) -> bool | None:
    """Runs a job that tests whether a compute node reaches the internet; None if it does not start in two minutes."""
    command = ["srun", "--job-name=hpc_train-internet", "--ntasks=1", "--time=1", f"--immediate={START_S}"]
    if chosen is not None:
        command.append(f"--partition={chosen.name}")
    try:
        tries = f"({REACHES}) 2> /dev/null && echo yes || echo no"
        answer = run([*command, "bash", "-c", tries], timeout_s=START_S + 60)
    except SlurmError:
        return None
    return {"yes": True, "no": False}.get(answer.strip())


def _add_internet(survey: Survey, chosen: Partition | None, reaches: bool | None) -> None:
    if reaches is None:
        survey.missing.append(f"internet on compute nodes: init --site --internet tests {HOST} in a job of 30 seconds")
        return
    where = "a compute node" if chosen is None else f"a node of {chosen.name}"
    if reaches:
        survey.add(
            "telemetry.wandb.mode", None, f"online sends metrics to W&B; {where} reaches {HOST} (tested by a job)"
        )
    else:
        why = f"{where} does not reach {HOST} (tested by a job); `sync` sends the metrics from a login node"
        survey.add("telemetry.wandb.mode", "offline", why)

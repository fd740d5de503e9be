"""The command ``exec`` runs a program that need not use hpc_train under the agents, as torchrun does.

    hpc-train exec --nnodes 2 --nproc-per-node 4 -- python train.py --lr 0.1

It needs neither a config file nor Hydra's syntax: it turns its options into overrides of ``run.command`` and takes the
path of ``train``, or inside a Slurm job that of a batch script (``freeze`` and ``job.sh``). Nothing parses the words
after ``--``. With roles (``run.roles``), each has a command; it ends where the next ``--role SPEC --`` begins:

    hpc-train exec --role trainer:nodes=2 -- python train.py --role judge:ready=port -- python serve.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

from hpc_train.commands.agent import start_agent
from hpc_train.commands.batch import frozen_run
from hpc_train.config.arguments import override_value
from hpc_train.config.options import OptionParser
from hpc_train.config.roles import nodes_of_roles, roles_of
from hpc_train.config.values import command_text, parse_range
from hpc_train.elastic.rendezvous.addresses import ServerAddress
from hpc_train.errors import UserError
from hpc_train.launch.executors.executor import select_executor
from hpc_train.launch.request import compose_job, parse_line
from hpc_train.machine.allocation import current_allocation, refuse_misplaced
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.streams import flush_output
from hpc_train.runs.job_status import command_exit_code
from hpc_train.schedulers.current import current_job
from hpc_train.schedulers.slurm.client import in_allocation, is_in_step
from hpc_train.units import counted

# option of sbatch -> config key
SBATCH = {
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "time": "cluster.time",
    "mem": "cluster.mem",
    "gres": "cluster.gres",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "nodelist": "cluster.nodelist",
}
FLAGS = ("--standalone", "--detach", "--json", "-m")  # options without a value
SHORT = {"partition": "-p", "account": "-A", "qos": "-q", "time": "-t", "constraint": "-C", "nodelist": "-w"}
# options of torchrun that the agents make unnecessary -> what to do instead
UNNEEDED = {
    "rdzv-backend": "the agents of a job find each other; leave it out",
    "rdzv-endpoint": "the agents of a job find each other; leave it out",
    "rdzv-id": "leave it out; --name gives the run a name",
    "rdzv-conf": "the agents of a job find each other; leave it out",
    "node-rank": "the scheduler numbers the nodes; leave it out",
    "master-addr": "each attempt gets the address of its first node; leave it out",
    "master-port": "each attempt gets a free port; leave it out",
    "local-addr": "leave it out; --set cluster.interface=NAME selects a network",
    "monitor-interval": "the agents notice an end at once; leave it out",
    "start-method": "each process is a new program; leave it out",
    "log-dir": "leave it out; `hpc-train logs RUN` prints the output",
    "redirects": "leave it out; `hpc-train logs RUN` prints the output",
    "tee": "leave it out; `hpc-train logs RUN` prints the output",
    "local-ranks-filter": "leave it out; `hpc-train logs RUN --rank 0` prints the output of a rank",
    "module": "write it after --: exec -- python -m MODULE",
    "no-python": "leave it out; write the program and its arguments after --",
    "run-path": "leave it out; write the program and its arguments after --",
}
POLL_S = 0.5
GPUS = re.compile(r"(?:(\w[\w.-]*):)?(\d+)")


def main(arguments: list[str]) -> int:
    """Runs a program on each GPU, or on each node, with the variables of torchrun; restarts it after failures."""
    options, words = parse(arguments)
    refuse_misplaced()
    overrides = overrides_of(options, words)
    shown = "--json" if options.json else "--echo"
    if not options.submit and not options.standalone and current_allocation().nodes > 1:
        return _run_on_node(overrides, shown)
    if not options.submit and not options.standalone and in_allocation() and not is_in_step():
        run = frozen_run(parse_line(overrides), "exec")
        agent = [sys.executable, "-m", "hpc_train", "agent", shown, str(run.path)]
        flush_output()
        os.execvp("bash", ["bash", "-c", 'RUN=$0; source "$RUN/job.sh" "$@"', str(run.path), *agent])
    from hpc_train.commands.train import main as train  # imports Hydra's application, which other paths do not need

    overrides += ["--multirun"] * options.submit + ["--json"] * options.json
    return train(overrides)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Returns the options, with ``run.roles`` as ``roles``, and the words of the command; the roles are empty for one
    command. Raises UserError if an option or the command is wrong."""
    parser = _parser()
    if "--" not in arguments:
        if {"-h", "--help"} & set(arguments):
            parser.print_help()
            raise SystemExit(0)
        _refuse_missing_command(arguments)
    end = arguments.index("--")
    words = tuple(arguments[end + 1 :])
    if not words:
        raise UserError("there is no command after --", where="the command line", fix=f"{parser.prog} -- python FILE")
    roles = {}
    if [*arguments[max(0, end - 2) : end - 1]] == ["--role"]:
        end -= 2
        roles = parse_roles(arguments[end:])
    options = parser.parse_args([_with_dashes(word) for word in arguments[:end]], argparse.Namespace(roles=roles))
    names = ", ".join(f"--{name}" for name in (*SBATCH, "detach") if getattr(options, name) not in (None, False))
    if names and not options.submit:
        raise UserError(f"{names} has no effect without -m", where=names, fix="-m submits the command as a job")
    if options.submit and options.standalone:
        what = "-m submits a job, and --standalone runs on this machine"
        raise UserError(what, where="-m, --standalone", fix="leave out one of them")
    if options.per == "node" and options.nproc_per_node is not None:
        what = f"--per node starts one process per node, and --nproc-per-node asks for {options.nproc_per_node}"
        raise UserError(what, where="--per, --nproc-per-node", fix="leave out one of them")
    if roles and (options.per != "gpu" or options.nproc_per_node is not None):
        what = "--per and --nproc-per-node apply to one command, but each role has a command"
        raise UserError(what, where="--per, --nproc-per-node", fix="--role NAME:per=node, or --role NAME:procs=N")
    return options, words


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m hpc_train exec",
        usage="python -m hpc_train exec [OPTION ...] -- COMMAND [ARGUMENT ...]",
        description=main.__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--nnodes",
        type=_node_range,
        metavar="N|MIN-MAX",
        help="the number of nodes, or a range (default: all nodes of the job, or 1)",
    )
    add(
        "--nproc-per-node",
        type=_process_count,
        metavar="auto|N",
        default="auto",
        help="processes per node; auto starts one per GPU, and one on a node without GPUs (default: auto)",
    )
    add("--per", choices=("gpu", "node"), default="gpu", help="what gets a process (default: gpu)")
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="restart after at most N failures, whatever they are (default: until three attempts made no progress)",
    )
    add("--name", help="the name of the run; the same name continues it")
    add(
        "--hang-timeout",
        type=float,
        metavar="S",
        help="restart if a process neither prints a line nor touches $HPC_TRAIN_PROGRESS for S seconds",
    )
    add("--standalone", action="store_true", help="run on this machine, also on a login node")
    add("-m", dest="submit", action="store_true", help="submit the command as a job")
    add("--detach", action="store_true", help="return after the submission")
    add(
        "--role",
        metavar="NAME[:KEY=VALUE,...]",
        help="begin a role, whose command follows --; another --role follows it. Keys: nodes, per, procs, gpus, ready, "
        "after (A+B, or none), on_failure; partition, constraint, cpus, mem of its nodes, with -m",
    )
    add("--gpus-per-node", type=_gpus, metavar="[TYPE:]N", help="GPUs per node; 0 uses CPUs")
    for name in SBATCH:
        add(*filter(None, [SHORT.get(name)]), f"--{name}", help=f"sbatch --{name}, with -m")
    add("--json", action="store_true", help="print only one JSON object, at the end of the run")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set a config key, such as elastic.spares=1")
    for name, advice in UNNEEDED.items():
        add(f"--{name}", nargs="?", action=_Unneeded, help=argparse.SUPPRESS, const=advice)
    return parser


def parse_roles(words: Sequence[str]) -> dict[str, dict[str, object]]:
    """Returns ``run.roles`` for the repeated words ``--role SPEC -- COMMAND``. Raises UserError if they are wrong."""
    ends = [
        number for number, word in enumerate(words) if word == "--role" and [*words[number + 2 : number + 3]] == ["--"]
    ]
    roles: dict[str, dict[str, object]] = {}
    for begin, end in pairwise([*ends, len(words)]):
        name, _, settings = words[begin + 1].partition(":")
        role: dict[str, object] = {}
        for setting in filter(None, settings.split(",")):
            key, equals, value = setting.partition("=")
            if not equals:
                raise UserError(f"--role does not accept {setting}", where=f"--role {name}", fix=f"{key}=VALUE")
            role[key] = int(value) if value.isdecimal() else value
        if "after" in role:
            role["after"] = [] if role["after"] == "none" else str(role["after"]).split("+")
        if role.get("gpus") == 0:
            role = {"procs": 1} | role
        command = words[begin + 3 : end]
        if not command or name in roles:
            what = f"the role {name} has no command" if not command else f"there are two roles {name}"
            raise UserError(what, where=f"--role {name}", fix=f"--role {name} -- python FILE, once for each role")
        roles[name] = {"command": command_text(command), **role}
    return roles


class _Unneeded(argparse.Action):
    """Refuses an option of torchrun; ``const`` is the advice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        what = f"exec has no option {option_string}, which torchrun has"
        raise UserError(what, where=str(option_string), fix=str(self.const))


def _with_dashes(word: str) -> str:
    """Returns an option in which torchrun accepts ``_``, such as ``--nproc_per_node=4``, with dashes."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _refuse_missing_command(arguments: Sequence[str]) -> NoReturn:
    fix = "hpc-train exec [OPTION ...] -- python train.py"
    takes_value = False
    for number, word in enumerate(arguments):
        if word.startswith("-"):
            takes_value = word not in FLAGS and "=" not in word and (word.startswith("--") or len(word) == 2)
        elif takes_value:
            takes_value = False
        else:
            python = ["python"] if word.endswith(".py") and "/" not in word else []  # as torchrun accepts it
            fix = shlex.join(["hpc-train", "exec", *arguments[:number], "--", *python, *arguments[number:]])
            break
    raise UserError("the command must follow --", where="the command line", fix=fix)


def _node_range(text: str) -> tuple[int, int]:
    numbers = parse_range(text.replace(":", "-"))
    if numbers is None:
        fix = "a number from 1, or a range: 2-4, 2:4"
        raise UserError(f"--nnodes does not accept {text}", where="--nnodes", fix=fix)
    return numbers


def _process_count(text: str) -> int | None:
    if text in ("auto", "gpu"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--nproc-per-node does not accept {text}", where="--nproc-per-node", fix="auto, or a number")
    return int(text)


def _gpus(text: str) -> tuple[str | None, int]:
    match = GPUS.fullmatch(text)
    if match is None:
        raise UserError(f"--gpus-per-node does not accept {text}", where="--gpus-per-node", fix="4, or a100:4")
    return match[1], int(match[2])


def overrides_of(options: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Returns the overrides of a training that runs ``words`` as ``options`` say."""
    command = command_text(words)
    name_in_job = _name_in_job(options, command)
    values: dict[str, object] = {
        "run.command": None if options.roles else command,
        "+run.roles": options.roles or None,
        "run.name": options.name or name_in_job,
        "run.per": "node" if options.per == "node" else None,
        "elastic.max_restarts": options.max_restarts,
        "elastic.hang_timeout_s": None if options.hang_timeout is None else f"{options.hang_timeout:g}",
        "launch.detach": options.detach or None,
    }
    if options.nnodes is not None:
        fewest, most = options.nnodes
        values["cluster.nodes"] = most
        if fewest < most:
            values |= {"cluster.nodes": f"{fewest}-{most}", "elastic.min_nodes": fewest}
    if options.gpus_per_node is not None:
        values["cluster.gpu_type"], values["cluster.gpus_per_node"] = options.gpus_per_node
    values |= {key: getattr(options, name) for name, key in SBATCH.items()}
    overrides = ["+strategy=dp", *(["cluster=local"] if options.standalone else [])]
    overrides += [f"{key}={override_value(value)}" for key, value in values.items() if value is not None]
    overrides += options.set
    if options.per == "gpu":
        config = compose_job(parse_line(overrides), "exec").config
        shape = select_executor(config.cluster).shape(config)
        if options.roles and options.nnodes is None:
            nodes = sum(part.nodes for part in shape.components) or nodes_of_roles(roles_of(config), shape.gpus)
            overrides.append(f"cluster.nodes={nodes}")
        if not shape.gpus:
            overrides.append(f"cluster.cpu_workers={options.nproc_per_node or 1}")
        elif options.nproc_per_node is not None:
            overrides.append(f"cluster.gpus_per_node={options.nproc_per_node}")
    return overrides


def _name_in_job(options: argparse.Namespace, command: str) -> str | None:
    """Returns a name that is the same after a requeue and differs between the commands of a job; None outside of one.

    Raises UserError if the job has another number of nodes than the options.
    """
    job = current_job()
    if not job.job_id or options.submit or options.standalone:
        return None
    nodes = job.nodes() or 1
    fewest, most = options.nnodes or (nodes, nodes)
    if not fewest <= nodes <= most:
        what = f"the command runs on all nodes of the job, which has {nodes}"
        fix = f"leave out --nnodes, or request a job of {counted(most, 'node', 'nodes')}"
        raise UserError(what, where="--nnodes", fix=fix)
    return f"{job.job_id}-{hashlib.sha256(command.encode()).hexdigest()[:4]}"


def _run_on_node(overrides: Sequence[str], shown: str) -> int:
    """Runs the agent of this node, where a launcher such as srun has started this command on each node of the job.

    Node 0 freezes the run, and the others wait for it. Raises UserError if it does not start within
    ``elastic.join_timeout_s``.
    """
    line = parse_line(overrides)
    allocation = current_allocation()
    if allocation.node_rank == 0:
        run = frozen_run(line, "exec")
    else:
        job = compose_job(line, "exec")
        run = RunDirectory(job.directory)
        until = time.monotonic() + job.config.elastic.join_timeout_s
        while ServerAddress.find(run, allocation.launch_id) is None:
            if time.monotonic() > until:
                what = f"node 0 has not started the run in {run.path} in {job.config.elastic.join_timeout_s:g} s"
                raise UserError(what, where="elastic.join_timeout_s", fix="see the output of node 0")
            time.sleep(POLL_S)
    code = start_agent([shown, str(run.path)])
    return code if code in (Exit.DONE, Exit.STOPPED) else command_exit_code(run) or code

"""The command ``debug`` looks into a rank of a live run with pdb, while all ranks wait between two steps.

The rank listens on a Unix socket of its node. On another node of a Slurm job, the command runs there as a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

from hpc_train.commands.submitted import ANSWERS_POLL_S, live_nodes, refuse_foreign_lease, stacks_of
from hpc_train.config.options import OptionParser
from hpc_train.errors import UserError
from hpc_train.launch.script import python, step_on_nodes
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import Event
from hpc_train.run.exits import Exit
from hpc_train.run.lease import is_live
from hpc_train.run.processes import is_peer_of_same_user
from hpc_train.run.requests import MOST_HOLD_S, HoldRequest, hold_requested, request_hold, withdraw_hold
from hpc_train.runs.job_status import hold_of
from hpc_train.runs.lookup import RunHandle, find_run

STACKS_S = 30.0


def main(arguments: list[str]) -> int:
    """Looks into a rank of a live run with pdb, between two steps; all ranks wait meanwhile."""
    parser = OptionParser(
        prog="python -m hpc_train debug",
        description=main.__doc__,
        epilog="Standard input has the commands of pdb: `p self.step` prints a value, `up` goes to the caller, "
        "`continue` or the end of the input ends the hold.",
    )
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument("--rank", type=int, required=True, metavar="N", help="the rank to look into")
    parser.add_argument(
        "--limit", type=float, default=600, metavar="SECONDS", help="the ranks wait this long at most (default: 600)"
    )
    parser.add_argument(
        "--wait", type=float, default=60, metavar="SECONDS", help="wait this long for the end of a step (default: 60)"
    )
    parser.add_argument("--debugpy", action="store_true", help="refused, because debugpy listens on TCP only")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the output of pdb at the end")
    parser.add_argument("--socket", help=argparse.SUPPRESS)  # of the rank, for the step on its node
    options = parser.parse_args(arguments)
    if options.debugpy:
        raise UserError(
            "debugpy listens on TCP only, where every user of the node could run code as you",
            where="--debugpy",
            fix="leave it out: pdb listens on a Unix socket that only you can open",
        )
    item = find_run(options.target, "debug")
    run = item.run
    refuse_foreign_lease(run)
    if options.socket is not None:
        _talk(_connect(options.socket), sys.stdout.fileno())
        return Exit.DONE
    nodes = live_nodes(run)
    _check(run, options)
    request = request_hold(run, options.rank, options.limit)
    try:
        return _debug(item, request, nodes, options)
    finally:
        withdraw_hold(run)


def _check(run: RunDirectory, options: argparse.Namespace) -> None:
    """Raises UserError if the rank of a live run cannot be held."""
    if not 0 < options.limit <= MOST_HOLD_S:
        what = f"--limit must be above 0 and at most {MOST_HOLD_S:g} s, got {options.limit:g}"
        raise UserError(what, where="--limit", fix="--limit 600")
    if run.record().get("own_code") == "command":
        raise UserError(
            "the steps of a command (run.command, exec) are not known, so its ranks cannot be held between two",
            where="RUN",
            fix=f"python -m hpc_train stacks {options.target}",
        )
    record = run.attempt_record(run.newest_attempt())
    world_size = record["nodes"] * record["workers_per_node"]
    if not 0 <= options.rank < world_size:
        what = f"the run has {world_size} ranks from 0 on, got {options.rank}"
        raise UserError(what, where="--rank", fix=f"--rank {world_size - 1}")
    request = hold_requested(run)
    if request is not None and hold_of(run, run.newest_attempt(), request) is not None:
        raise UserError(f"rank {request.rank} is held already", where="RUN", fix="wait until that hold ends")


def _debug(item: RunHandle, request: HoldRequest, nodes: int, options: argparse.Namespace) -> int:
    run = item.run
    until = time.monotonic() + options.wait
    while (held := hold_of(run, run.newest_attempt(), request)) is None:
        if not is_live(run):
            print("the run has ended", file=sys.stderr)
            return Exit.FAILED
        if time.monotonic() > until:
            print(f"rank {request.rank} did not end a step within {options.wait:g} s; its stacks:", file=sys.stderr)
            text = "".join(stacks_of(run, nodes, STACKS_S).values())
            parts = re.split(r"^(?=--- rank \d+ on )", text, flags=re.MULTILINE)
            print(*(part for part in parts if part.startswith(f"--- rank {request.rank} on ")), file=sys.stderr)
            return Exit.FAILED
        time.sleep(ANSWERS_POLL_S)
    if not options.json:
        _look(item, held, sys.stdout.fileno())
        return Exit.DONE
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        _look(item, held, output.fileno())
        output.seek(0)
        print(json.dumps({"rank": held.rank, "node": held.node, "step": held.step, "output": output.read()}))
    return Exit.DONE


def _look(item: RunHandle, held: Event, output: int) -> None:
    """Connects to the rank that is held, here or as a step on its node, and passes its output to the file ``output``.

    Raises:
        UserError: the node of the rank cannot be reached.
    """
    run = item.run
    try:
        connection = _connect(held.path)
    except (FileNotFoundError, ConnectionRefusedError) as error:  # the socket of another node
        job_id = run.attempt_record(run.newest_attempt()).get("job_id")
        if job_id is None:
            what = f"rank {held.rank} listens at {held.path} on {held.node}, which this machine cannot reach"
            raise UserError(what, where="RUN", fix=f"run the command on {held.node}") from error
        where = ["--overlap", f"--jobid={job_id}", f"--nodelist={held.node}", "--unbuffered"]
        words = ["debug", str(run.path), f"--rank={held.rank}", f"--socket={held.path}"]
        command = step_on_nodes(1, *where, python(item.config.cluster), "-m", "hpc_train", *words)
        if subprocess.run(command, check=False, stdout=output).returncode != 0:
            what = f"srun did not reach rank {held.rank} on {held.node}"
            raise UserError(what, where="RUN", fix="the lines above have the reason") from error
    else:
        _talk(connection, output)


def _connect(path: str) -> socket.socket:
    """Connects to the rank that listens at ``path``. Raises UserError if the process there belongs to another user."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    if not is_peer_of_same_user(connection):
        raise UserError(f"the process at {path} belongs to another user", where="RUN", fix="name one of your runs")
    return connection


def _talk(connection: socket.socket, output: int) -> None:
    """Passes standard input to the debugger, and its output to the file ``output``, until the debugger ends."""
    inputs: list[socket.socket | int] = [connection, 0]
    ends_line = True
    with connection, suppress(ConnectionError):  # the debugger ends first
        while True:
            ready, _, _ = select.select(inputs, [], [])
            if connection in ready:
                data = connection.recv(1 << 16)
                if not data:
                    return
                os.write(output, data)
            if 0 in ready:
                typed = os.read(0, 1 << 16)
                if not typed:  # a closed connection would interrupt the statement that runs
                    inputs.remove(0)
                    typed = b"continue\n" if ends_line else b"\ncontinue\n"
                ends_line = typed.endswith(b"\n")
                connection.sendall(typed)

"""The text of batch scripts: one agent per node in one step of the job, the exit code of the job, and its requeue.

The same text serves ``-m``, which passes the resources on sbatch's command line, ``python -m hpc_train script``, which
writes them into the script, and hand-written scripts, which source ``job.sh`` of the run. It is bash, because a batch
script runs outside of containers and may have no Python.

``launch.chain`` is for sites that do not requeue: each job begins when the one before has ended. All are submitted at
once. A job that stops before its time limit, or is lost with its node, leaves the rest of the run to the next one,
unless it has saved nothing new. A run that ends in any other way cancels the remaining jobs, whose ids the launcher
writes into a file in ``attempts/``. A job that begins before that file is written finds the end of the chain recorded
beside it, and exits.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.container import IN_SHELL, Container, quoted
from hpc_train.launch.gpus import gpu_export_lines
from hpc_train.launch.sbatch import Options, arguments
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory

ENVIRONMENT = """\
# sites that submit with --export=NONE would leave the step without this environment
export SLURM_EXPORT_ENV=ALL
# srun does not take over the cores per task of the job by itself; a node of its own has all of its cores
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}"
""".rstrip()

BY_HAND = """\
# The rest of a batch script by hand whose run is frozen, as submitted jobs have it. The arguments start an agent:
#     source "$RUN/job.sh" python -m hpc_train agent "$RUN"
""".rstrip()

# srun runs in the background: the script could not go on while it waits in the foreground.
SRUN_ENDS = """\
# A step ends only when all of its tasks have, and one on a frozen node (a file system that hangs, memory that swaps)
# does not. The agents tell the end when they have nothing more to do: the step then has 25 s to end, Slurm is asked to
# kill it, and after 10 s more this script goes on without it. What cannot be killed, Slurm ends with the job.
srun_ends() { # whether srun has ended, within so many seconds
  for ((second = 0; second < $1; second++)); do
    kill -0 "$srun" 2> /dev/null || return 0
    sleep 1 || true
  done
  return 1
}
""".rstrip()
WAIT = """\
  srun=$! told=
  while [ -z "$told" ] && kill -0 "$srun" 2> /dev/null; do
    sleep 1 || true # scancel ends it with TERM
    told=$(ls "$end".node-* 2> /dev/null) || true
  done
  if ! srun_ends 25; then
    echo "the agents have told their end, and the step still runs (is a node frozen?): Slurm is asked to kill it" >&2
    number=$(sed -n 's/^step //p' "$end".node-* | tail -n 1)
    [ -z "$number" ] || timeout 15 scancel --signal=KILL "$job.$number" || true
  fi
  srun_ends 10 || kill -KILL "$srun" || true
  status=0
  wait "$srun" || status=$?
""".rstrip()


@dataclass(frozen=True)
class Script:
    """The parts that differ between scripts.

    Attributes:
        title: one line that says what runs.
        run: bash lines that set RUN to the run directory.
        container: the container of the agents; None for none.
        header: options for #SBATCH lines; empty if they are passed on the command line.
        code: the snapshot of the code that the agents run; None for none.
        chain: the file with the ids of the jobs of the chain; None for a job that may be requeued.
        notes: further comment lines below the title.
        goes_on_without_a_node: whether the agents of the other nodes survive the loss of a node.
    """

    title: str
    cluster: ClusterConfig
    run: Sequence[str]
    header: Options
    code: FrozenCode | None = None
    chain: Path | None = None
    container: Container | None = None
    notes: Sequence[str] = ()
    goes_on_without_a_node: bool = False


def render(script: Script) -> str:
    """The text of a batch script."""
    cluster = script.cluster
    blocks = [
        ["#!/bin/bash", f"# {script.title}", *(f"# {note}" for note in script.notes), *_header(script.header)],
        [*_environment(cluster), *_frozen(script.code)],
        ["# setup", *cluster.setup] if cluster.setup else [],
        [] if script.container is None else script.container.lines(),
        gpu_export_lines(),
        script.run,
        requeue_lines_before(),
        [] if script.chain is None else chain_lines_before(script.chain),
        _step(_agent(cluster, script.container), script.goes_on_without_a_node),
        ["# teardown", *cluster.teardown] if cluster.teardown else [],
        requeue_script_lines() if script.chain is None else [*requeue_end_lines(), *chain_script_lines()],
    ]
    return _text(blocks)


def by_hand(goes_on: bool) -> str:
    """The text that a hand-written batch script sources after it has frozen RUN: the same as in a submitted job."""
    blocks = [
        BY_HAND.splitlines(),
        ENVIRONMENT.splitlines(),
        gpu_export_lines(),
        requeue_lines_before(),
        _step(['"$@"'], goes_on),
        requeue_script_lines(),
    ]
    return _text(blocks)


def _text(blocks: Iterable[Sequence[str]]) -> str:
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def one_run(run: Path) -> list[str]:
    """Bash lines that set RUN to a single frozen run."""
    return [f"RUN={shlex.quote(str(run))}"]


def run_of_task(listing: Path) -> list[str]:
    """Bash lines that set RUN in an array; ``listing`` has one run directory per line, in the order of the tasks."""
    return [
        "# each task of the array trains the run on its line of this list",
        f'RUN=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(listing))})',
    ]


def freezing(cluster: ClusterConfig, overrides: Sequence[str], container: Container | None = None) -> list[str]:
    """Bash lines that freeze the run and set RUN; a restarted job finds the run frozen."""
    parts = [python(cluster, container), "-m", "hpc_train", "freeze", *overrides]
    if container is not None:
        options = container.srun_options(IN_SHELL)
        parts = [*(["srun", "--nodes=1", "--ntasks=1", *options] if options else container.command(IN_SHELL)), *parts]
    command = quoted(parts)
    return [
        "# writes the run directory and prints its path; a job that Slurm starts again finds it as it was",
        f'RUN=$({command} "$@") || exit',
    ]


def python(cluster: ClusterConfig, container: Container | None = None) -> str:
    """The interpreter on the nodes, or in the container."""
    return cluster.python or (sys.executable if container is None else "python")


def _header(options: Options) -> list[str]:
    if not options:
        return ["# the resources stand on sbatch's command line: SBATCH_* variables would win over lines here"]
    return [
        "# SBATCH_* variables win over these lines, options on sbatch's command line over both",
        *(f"#SBATCH {argument}" for argument in map(_quoted, arguments(options))),
    ]


def _quoted(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if equals else name


def _environment(cluster: ClusterConfig) -> list[str]:
    return [*ENVIRONMENT.splitlines(), *(f"export {name}={shlex.quote(value)}" for name, value in cluster.env.items())]


def _frozen(code: FrozenCode | None) -> list[str]:
    if code is None:
        return []
    return [
        "# the code as it was at submission",
        f"export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(os.pathsep.join(code.paths))}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]


def when_a_node_is_lost(goes_on: bool) -> tuple[str, ...]:
    """The options of ``srun`` for the loss of a node: whether Slurm keeps or ends the agents of the other nodes."""
    return (*(["--no-kill"] if goes_on else []), "--kill-on-bad-exit=0", "--wait=0")


def _agent(cluster: ClusterConfig, container: Container | None) -> list[str]:
    """The last lines of the ``srun`` command."""
    options = [] if container is None else container.srun_options(IN_SHELL)
    command = [] if container is None else container.command(IN_SHELL)
    around = [f"{quoted(parts)} \\" for parts in (options, command) if parts]
    return [*around, f'{shlex.quote(python(cluster, container))} -m hpc_train agent "$RUN"']


def _step(agent: Sequence[str], goes_on: bool) -> list[str]:
    losses = "go on without it" if goes_on else "end with it"
    return [
        *SRUN_ENDS.splitlines(),
        "",
        f"# one task per node, the agent; it starts a worker per GPU. Where a node is lost, the others {losses}.",
        "# Agents that were all killed by a signal have told no end: another step of the same job takes over.",
        'rm -f "$end".node-* # of an earlier run in the same allocation',
        "trap : INT # a Ctrl-C is srun's to judge",
        "for step in 1 2 3; do",
        '  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\',
        f"      {' '.join(when_a_node_is_lost(goes_on))} --unbuffered \\",
        *(f"      {line}" for line in agent[:-1]),
        f"      {agent[-1]} &",
        *WAIT.splitlines(),
        '  if [ "$status" -le 128 ] || [ -n "$told$cancelled" ]; then break; fi',
        "done",
        "trap - INT",
    ]


REQUEUE_BEFORE = """\
# A cancelled job never comes back: scancel sends TERM to this script too.
cancelled=
trap 'cancelled=yes' TERM

# the names of the files in which the agents tell how this start of the job ended, and the job in Slurm's commands
end="$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
""".rstrip()

REQUEUE_END = """\
# How it ended, from the agents; srun's own code tells no more than that something failed.
[ "$status" -eq 0 ] || status=1
for known in 1 2 93 75 0; do
  if grep -qsx "$known" "$end".node-*; then status=$known; break; fi
done
""".rstrip()

REQUEUE_AFTER = """\
# Stopped ahead of the time limit or by a preemption: ask Slurm, once, to run the job again. Not where it is being
# cancelled (`incomplete` sees that too, should it happen now), is held (priority 0), or where Slurm requeues it itself.
if [ "$status" -eq 75 ] && [ -e "$end.requeue" ] && [ -z "$cancelled" ]; then
  for wait in 0 5 10 20; do
    sleep "$wait"
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format='%T %Q') && break
  done
  if [[ "$state" == RUNNING* && "$state" != *" 0" && -z "$cancelled" ]]; then
    trap '' TERM # Slurm ends this script when it takes the job back: scontrol is not to die of that
    if ! scontrol requeue incomplete "$job"; then
      echo "Slurm refuses to run the job again. This goes on: python -m hpc_train resume $RUN" >&2
      exit 93
    fi
    # nodes that have failed more than once; Slurm takes the list as soon as the job waits again
    if [ -e "$end.exclude" ]; then
      for wait in 0 0.5 0.5 1 1; do
        sleep "$wait"
        if scontrol update JobId="$job" ExcNodeList="$(cat "$end.exclude")"; then break; fi
      done
    fi
  fi
fi
exit "$status"
""".rstrip()


def requeue_lines_before() -> list[str]:
    """The lines before the ``srun`` of the agents; ``$RUN`` is the run directory."""
    return REQUEUE_BEFORE.splitlines()


def requeue_end_lines() -> list[str]:
    """The lines that turn ``$status``, the exit code of ``srun``, into the exit code of the job."""
    return REQUEUE_END.splitlines()


def requeue_script_lines() -> list[str]:
    """The last lines of a batch script."""
    return [*requeue_end_lines(), *REQUEUE_AFTER.splitlines()]


CHAIN_BEFORE = """\
# One job of a chain. It leaves when the run has ended in an earlier one, or a person has cancelled an earlier one.
[ ! -e "$CHAIN.over" ] || exit 0
if [ -s "$CHAIN" ] && squeue --noheader --states=CANCELLED --jobs="$(paste -sd, "$CHAIN")" | grep -q .; then
  scancel $(cat "$CHAIN")
  exit 75
fi
saved=$(ls "$RUN/checkpoints")
""".rstrip()

CHAIN_AFTER = """\
# The next job of the chain goes on where this one has stopped, or where its time limit or a preemption has ended it.
if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  cancelled=
elif scontrol show job "$SLURM_JOB_ID" | grep -q 'Reason=TimeLimit'; then
  cancelled=
  if [ "$saved" = "$(ls "$RUN/checkpoints")" ]; then cancelled=yes; fi # the next would get no further
elif [ ! -e "$end.requeue" ]; then
  cancelled=yes
elif [ -e "$end.exclude" ]; then # nodes that have failed more than once
  for next in $(grep -vx "$SLURM_JOB_ID" "$CHAIN"); do
    scontrol update JobId="$next" ExcNodeList="$(cat "$end.exclude")" || true
  done
fi
if [ -n "$cancelled" ]; then # done, failed, given up, or cancelled: nothing is left to do for the others
  : > "$CHAIN.over"
  others=$(grep -vx "$SLURM_JOB_ID" "$CHAIN") && scancel $others
fi
exit "$status"
""".rstrip()


def chain_file(run: RunDirectory) -> Path:
    """The file with the ids of the chain that is submitted next, one per line."""
    return run.attempts / f"chain-{len(run.record().get('submissions', [])):03d}"


def chain_lines_before(file: Path) -> list[str]:
    return [f"CHAIN={shlex.quote(str(file))}", *CHAIN_BEFORE.splitlines()]


def chain_script_lines() -> list[str]:
    """The last lines of the batch script of a chained job, instead of those that requeue it."""
    return CHAIN_AFTER.splitlines()


def submit_chain(count: int, one: Callable[[str | None], str]) -> list[str]:
    """Submits ``count`` jobs by ``one``, which takes a dependency; returns their ids in order."""
    ids = [one(None)]
    while len(ids) < count:
        ids.append(one(f"afterany:{ids[-1]}"))
    return ids

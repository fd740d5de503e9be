"""Writes the text of batch scripts: a step with one agent per node, the exit code of the job, and its requeue.

``-m`` passes the resources on sbatch's command line, ``python -m hpc_train script`` writes them into the script, and
hand-written scripts source ``job.sh`` of the run; the rest of the text is the same. The text is bash, because a batch
script runs outside of containers and may have no Python.

``launch.chain`` is for sites that do not requeue: all jobs are submitted at once, and each begins when the previous job
has ended. If a job stops before its time limit or is lost with its node, the next job continues the run, unless the job
has saved nothing new. If the run ends in any other way, the job cancels the remaining jobs, whose ids the launcher
writes into a file in ``attempts/``. A job that begins before that file is written finds the recorded end of the chain
and exits.

``cluster.first`` submits several jobs for one run. The script of the first that starts records its id, and cancels the
others; a job that starts later finds another id and exits.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpc_train.config.schema import ClusterConfig, Config
from hpc_train.errors import UserError
from hpc_train.launch.gpus import EXPORT
from hpc_train.launch.sbatch import EXPEDITE, Options, arguments, reason_of
from hpc_train.machine.amd_gpus import amd_memory
from hpc_train.machine.environment import job_environment
from hpc_train.machine.gpus import Machine
from hpc_train.run.code import FrozenCode
from hpc_train.run.directory import RunDirectory
from hpc_train.schedulers.slurm.client import query
from hpc_train.schedulers.slurm.variables import unset_lines


def shell_word(value: str) -> str:
    """Returns ``value`` as one word of bash on one line.

    Raises UserError if it contains a NUL character, which no argument or variable can hold.
    """
    if "\0" in value:
        raise UserError(
            f"{value!r} contains a NUL character", where="the config", fix="remove it; programs cannot receive it"
        )
    if value.isprintable():
        return shlex.quote(value)
    return f"$'{''.join(map(_escaped, value))}'"


def exports(variables: Mapping[str, str]) -> list[str]:
    """Returns the lines that export ``cluster.env``.

    Raises UserError if a name is not valid for a variable, or a value contains a NUL character.
    """
    return [f"export {name}={shell_word(value)}" for name, value in job_environment(variables).items()]


def code_lines(code: FrozenCode | None) -> list[str]:
    """Returns the lines with which a job imports the frozen code; none if no code was frozen."""
    if code is None:
        return []
    paths = shell_word(os.pathsep.join(code.paths))
    return [
        "# the code as it was at submission",
        f"export PYTHONSAFEPATH=1 PYTHONPATH={paths}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]


def comment(text: str) -> str:
    """Returns a line with ``text`` as a comment."""
    return f"# {''.join(char if char.isprintable() else ' ' for char in text)}"


def own_lines(lines: Iterable[str], key: str) -> list[str]:
    """Returns the bash commands that the user has set as ``key``. A command may have several lines.

    Raises UserError if they contain a character because of which sbatch would refuse the script.
    """
    text = list(lines)
    for line in text:
        if "\0" in line or "\r" in line:
            raise UserError(
                f"{key} has a carriage return or NUL character: {line!r}",
                where=key,
                fix="remove it; a file with Windows line ends is converted by dos2unix",
            )
    return text


def setup_lines(lines: Iterable[str]) -> list[str]:
    """Returns the lines of ``cluster.setup``. Bash continues after a line that fails, so the script reports the line.

    Raises UserError as ``own_lines``.
    """
    commands = own_lines(lines, "cluster.setup")
    if not commands:
        return []
    # the line of the script instead of BASH_COMMAND, which may be a command inside a function such as `module`
    report = """failed=$? line=$(sed -n "${LINENO}p" "$0" 2> /dev/null)"""
    report = f"""trap '{report}; echo "cluster.setup: a line failed with status $failed: $line" >&2' ERR"""
    ended = """trap 'code=$?; [ -n "$set_up" ] || echo "cluster.setup ended the job with status $code" >&2' EXIT"""
    return ["# setup", report, "set_up=", ended, *commands, "trap - ERR", "set_up=yes"]


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "'\\":
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


LOCAL = ("SLURM_TMPDIR", "TMPDIR")  # node-local space, for caches
IN_SHELL = "HPC_TRAIN_BINDS"  # placeholder for the variable BINDS of a batch script


@dataclass(frozen=True)
class Container:
    """An image and its mounts as ``/host:/inside``. ``gpus`` also mounts the libraries of the NVIDIA driver, or with
    ``rocm`` the libraries of ROCm.
    """

    image: str
    pyxis: bool
    binds: tuple[str, ...]
    gpus: bool
    rocm: bool = False

    def srun_options(self, binds: str) -> list[str]:
        """Returns the options of ``srun`` for pyxis."""
        if not self.pyxis:
            return []
        return [f"--container-image={self.image}", f"--container-mounts={binds}"]

    def command(self, binds: str) -> list[str]:
        """Returns the prefix of a command that runs inside the container."""
        if self.pyxis:
            return []
        command = ["apptainer", "exec"]
        if self.gpus:
            command.append("--rocm" if self.rocm else "--nv")
        return [*command, "--bind", binds, self.image]

    def seen(self, environment: Mapping[str, str] = os.environ) -> str:
        """Returns the mounts, including the node-local directories of this job."""
        local = [environment[name] for name in LOCAL if environment.get(name)]
        return ",".join(dict.fromkeys([*self.binds, *(_same(path) for path in local if Path(path).is_dir())]))

    def lines(self) -> list[str]:
        """Returns bash lines that set the variable BINDS."""
        names = " ".join(f'"${{{name}:-}}"' for name in LOCAL)
        lines = [
            "# what the container sees of a node: the runs with their code, data, and node-local space",
            f"BINDS={shell_word(','.join(self.binds))}",
            f'for local in {names}; do [ ! -d "$local" ] || BINDS="$BINDS,$local:$local"; done',
        ]
        if self.gpus and not self.pyxis and not self.rocm:
            # the kind of GPU may be unknown at submission; the variable has the same effect as the option --rocm
            lines.append("[ ! -e /dev/kfd ] || [ -e /dev/nvidiactl ] || export APPTAINER_ROCM=1  # AMD GPUs")
        return lines


def container_of(config: Config, gpus: int) -> Container | None:
    """Returns the container of ``cluster.container``; None without an image.

    Raises UserError if the image is a file that does not exist.
    """
    settings = config.cluster.container
    image = settings.image
    if image is None:
        return None
    if image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh")):
        image = str(Path(image).expanduser().absolute())
        if not Path(image).exists():
            raise UserError(
                f"image {image} does not exist", where="cluster.container.image", fix="the path of a .sif or .sqsh file"
            )
    pyxis = settings.runtime == "pyxis"
    if settings.runtime == "auto":
        pyxis = not image.endswith(".sif") and srun_has_pyxis()
    gpu_type = config.cluster.gpu_type
    rocm = False
    if gpus and gpu_type is not None:
        rocm = amd_memory(gpu_type) is not None
    elif gpus:
        rocm = Machine.this().amd is not None
    sources = getattr(config.data, "sources", {}).values()
    paths = [getattr(config.data, "path", None), *(source.get("path") for source in sources)]
    inputs = [str(Path(path).absolute()) for path in paths if path and Path(path).is_dir()]
    root = str(Path(config.run.root).expanduser().absolute())
    binds = tuple(dict.fromkeys(map(_same, [root, *inputs, *settings.binds])))
    return Container(image, pyxis, binds, gpus > 0, rocm)


def quoted(parts: Sequence[str]) -> str:
    """Returns the command ``parts`` as bash on one line, in which ``IN_SHELL`` is replaced by the variable BINDS."""
    return " ".join(map(shell_word, parts)).replace(IN_SHELL, '"$BINDS"')


def _same(bind: str) -> str:
    """Returns ``bind`` with a path inside the container, by default the same path as on the host."""
    return bind if ":" in bind else f"{bind}:{bind}"


@cache
def srun_has_pyxis() -> bool:
    """Returns whether ``srun`` starts containers with pyxis; cached per process."""
    return "--container-image" in (query(["srun", "--help"]) or "")


@dataclass(frozen=True)
class Block:
    """Lines of a script, and their purpose in one line (``script --explain``).

    Attributes:
        joined: whether the lines follow the previous block without an empty line.
    """

    reason: str
    lines: Sequence[str]
    joined: bool = False


ENVIRONMENT = (
    "\n".join(unset_lines())
    + """
# with sbatch --export=NONE, the step would otherwise not get this environment
export SLURM_EXPORT_ENV=ALL
# srun does not inherit --cpus-per-task from the job; on exclusive nodes, and if the job requests several tasks per
# node, the agent gets all cores of the smallest node
if [ "${SLURM_NTASKS_PER_NODE:-1}" -gt 1 ] || [ "${SLURM_NTASKS:-0}" -gt "${SLURM_JOB_NUM_NODES:-1}" ]; then
  unset SLURM_CPUS_PER_TASK
fi
cores=$(tr , '\\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | head -n 1) # of 64(x2),32
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${cores%%(*}}"
""".rstrip()
)

BY_HAND = """\
# The part of a batch script after `freeze`, the same as in jobs that `-m` submits. The arguments start an agent:
#     source "$RUN/job.sh" python -m hpc_train agent "$RUN"
if [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "$0 starts its agents with srun, and this shell is not in a Slurm job" >&2
  echo "  fix:    sbatch $0 with the same arguments; outside of Slurm: python -m hpc_train agent $RUN" >&2
  exit 2
fi
""".rstrip()

# srun runs in the background, because a script cannot stop waiting for a command in the foreground.
SRUN_ENDS = """\
# A step ends only when all of its tasks have ended, but a task on a frozen node (a hung file system, swapping) does
# not end. The agents record their end in a file. The step then has 25 s to end; after that, this script requests
# Slurm to kill it, and continues 10 s later in any case. Slurm kills the remaining processes at the end of the job.
srun_ends() { # returns 0 if srun ends within $1 seconds
  for ((second = 0; second < $1; second++)); do
    kill -0 "$srun" 2> /dev/null || return 0
    sleep 1 || true
  done
  return 1
}
""".rstrip()
WAIT = """\
  srun=$! recorded=
  while [ -z "$recorded" ] && kill -0 "$srun" 2> /dev/null; do
    sleep 1 || true # scancel interrupts the sleep with TERM
    recorded=$(ls "$end".node-* 2> /dev/null) || true
    if ((announced && SECONDS >= announced)); then # repeated after 10 s, since agents miss the signal while they start
      kill -USR2 "$srun" 2> /dev/null || true
      announced=$((SECONDS + 10))
    fi
  done
  if ! srun_ends 25; then
    echo "the agents have ended but their step has not (a node may be frozen): asking Slurm to kill the step" >&2
    number=$(sed -n 's/^step //p' "$end".node-* | tail -n 1)
    [ -z "$number" ] || timeout 15 scancel --signal=KILL "$job.$number" || true
    srun_ends 10 || kill -KILL "$srun" || true
    date +%s > "$end.frozen" || true # the frozen node held the job until now
  fi
  status=0
  wait "$srun" || status=$?
""".rstrip()


@dataclass(frozen=True)
class Script:
    """The parts that differ between scripts.

    Attributes:
        title: one line that names the run.
        run: bash lines that set RUN to the run directory.
        container: the container of the agents; None outside of containers.
        header: options for #SBATCH lines, for each component; empty if they are passed on the command line.
        code: the snapshot of the code that the agents run; None runs the installed code.
        chain: the file with the ids of the jobs of the chain; None without a chain, for a job that may be requeued.
        notes: further comment lines below the title.
        survives_node_loss: whether the agents of the other nodes survive the loss of a node.
        restarts: whether another step starts if signals have killed all agents.
        agent_options: the options of ``python -m hpc_train agent``.
        on_event: the command of ``run.on_event``.
        first: the file with the id of the job of ``cluster.first`` that has started first; None without alternatives.
        components: the number of components of a heterogeneous job; 1 for another job.
    """

    title: str
    cluster: ClusterConfig
    run: Sequence[str]
    header: Sequence[Options]
    code: FrozenCode | None = None
    chain: Path | None = None
    container: Container | None = None
    notes: Sequence[str] = ()
    survives_node_loss: bool = False
    restarts: bool = True
    agent_options: Sequence[str] = ()
    on_event: str | None = None
    first: Path | None = None
    components: int = 1


def render(script: Script) -> str:
    """Returns the text of a batch script."""
    return text_of(blocks_of(script))


def text_of(blocks: Iterable[Block]) -> str:
    """Returns the text of a script."""
    return "".join(
        ("" if number == 0 or block.joined else "\n") + "".join(f"{line}\n" for line in block.lines)
        for number, block in enumerate(blocks)
    )


def blocks_of(script: Script) -> list[Block]:
    """Returns the blocks of a batch script."""
    cluster = script.cluster
    container = script.container
    interpreter = python(cluster, container)
    blocks = _title(script)
    blocks += [
        Block(
            "keep variables of your shell from Slurm's commands; give the agent all cores",
            ENVIRONMENT.splitlines(),
        ),
        Block("cluster.env", exports(cluster.env), joined=True),
    ]
    code = code_lines(script.code)
    blocks.append(Block("import the frozen copy of your code, not your later edits", code, joined=True))
    agent = []
    if container is not None:
        around = (container.srun_options(IN_SHELL), container.command(IN_SHELL))
        agent = [f"{quoted(parts)} \\" for parts in around if parts]
    agent.append(f'{shell_word(interpreter)} {" ".join(["-m hpc_train agent", *script.agent_options])} "$RUN"')

    step = _step(agent, script.survives_node_loss, script.components, script.restarts)
    setup = Block("cluster.setup; a line that fails is reported and does not end the job", setup_lines(cluster.setup))
    gpus = Block("give each step the GPUs of the job, whichever option requested them", EXPORT.splitlines())
    blocks.append(setup)
    if container is None:
        interpreter_lines = python_lines(cluster)
        blocks += [gpus, Block("end with the fix if the node does not have this Python", interpreter_lines)]
    else:
        blocks += [Block("what the container sees of the node", container.lines()), gpus]
    blocks += [
        Block("the run directory; a requeued job uses the same one", script.run),
        Block("notice scancel and the signal before the time limit", REQUEUE_BEFORE.splitlines()),
    ]
    if script.first is not None:
        first = [f"FIRST={shell_word(str(script.first))}", *FIRST_BEFORE.splitlines()]
        blocks.append(Block("cluster.first: exit if another job of the run has started before", first))
    if script.chain is None and cluster.requeue == EXPEDITE:
        blocks.append(Block("cluster.requeue=expedite: cancel a job that has failed", EXPEDITED.splitlines()))
    if script.chain is not None:
        chain = [f"CHAIN={shell_word(str(script.chain))}", *CHAIN_BEFORE.splitlines()]
        blocks.append(Block("launch.chain: exit if an earlier job of the chain has ended the run", chain))
    blocks += [
        Block("end a step that a frozen node keeps from ending", SRUN_ENDS.splitlines()),
        Block("start one agent per node, pass the signal on, and wait", step),
        Block("run.on_event, if no agent is left to call it", on_event_lines(script.on_event)),
    ]
    if cluster.teardown:
        teardown = ["# teardown", *own_lines(cluster.teardown, "cluster.teardown")]
        blocks.append(Block("cluster.teardown", teardown))
    blocks.append(Block("the exit code that the agents recorded, instead of that of srun", REQUEUE_END.splitlines()))
    if script.chain is None:
        requeue = [*REQUEUE_AFTER.splitlines(), EXIT]
        blocks.append(Block("requeue a job that stopped early, without nodes that failed twice", requeue, joined=True))
    else:
        chain = CHAIN_AFTER.splitlines()
        blocks.append(Block("launch.chain: cancel the next jobs if nothing is left to do", chain, joined=True))
    return [block for block in blocks if block.lines]


def _title(script: Script) -> list[Block]:
    """Returns the blocks with the title and the options of sbatch."""
    lines = ["#!/bin/bash", *map(comment, [script.title, *script.notes])]
    if script.header:
        lines.append("# SBATCH_* variables override these lines, and options on sbatch's command line override both")
    else:
        lines.append(
            "# the resources are on sbatch's command line, because SBATCH_* variables override lines of a script"
        )
    blocks = [Block("the run and its layout, and when Slurm signals the job to stop", lines)]
    for number, options in enumerate(script.header):
        if number:
            blocks.append(Block(f"{'hetjob':<28}another kind of nodes", ["#SBATCH hetjob"], joined=True))
        for option, argument in zip(options, arguments(options), strict=True):
            name, equals, value = argument.partition("=")
            line = f"#SBATCH {name}={shell_word(value)}" if equals else f"#SBATCH {name}"
            blocks.append(Block(f"{argument:<28}{reason_of(option)}", [line], joined=True))
    return blocks


def explanation(blocks: Sequence[Block]) -> list[tuple[int, int, str]]:
    """Returns the numbers of the first and the last line of each block in the script, and the purpose of the block."""
    rows = []
    end = 0
    for block in blocks:
        first = end + (1 if block.joined or end == 0 else 2)
        end = first + len(block.lines) - 1
        rows.append((first, end, block.reason))
    return rows


def by_hand(survives: bool, on_event: str | None = None, components: int = 1) -> str:
    """Returns the text that a hand-written batch script sources after ``freeze``, in a job with ``components``."""
    blocks = [
        BY_HAND.splitlines(),
        ENVIRONMENT.splitlines(),
        EXPORT.splitlines(),
        REQUEUE_BEFORE.splitlines(),
        SRUN_ENDS.splitlines(),
        _step(['"$@"'], survives, components),
        on_event_lines(on_event),
        [*REQUEUE_END.splitlines(), *REQUEUE_AFTER.splitlines(), EXIT],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def one_run(run: Path) -> list[str]:
    """Returns bash lines that set RUN to a single frozen run."""
    return [f"RUN={shell_word(str(run))}"]


def run_of_task(listing: Path) -> list[str]:
    """Returns bash lines that set RUN in an array. Each line of the file ``listing`` is the run directory of one
    task."""
    return [
        "# each task of the array trains one run: line SLURM_ARRAY_TASK_ID + 1 of this list",
        f'RUN=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shell_word(str(listing))})',
    ]


def freezing(cluster: ClusterConfig, overrides: Sequence[str], container: Container | None = None) -> list[str]:
    """Returns bash lines that freeze the run and set RUN; a restarted job uses the frozen run."""
    parts = [python(cluster, container), "-m", "hpc_train", "freeze", *overrides]
    if container is not None and container.pyxis:
        parts = ["srun", "--nodes=1", "--ntasks=1", *container.srun_options(IN_SHELL), *parts]
    elif container is not None:
        parts = [*container.command(IN_SHELL), *parts]
    command = quoted(parts)
    return [
        "# writes the run directory and prints its path; in a requeued job, the directory stays unchanged",
        f'RUN=$({command} "$@") || exit',
    ]


NODES_OF_JOB = '"$SLURM_JOB_NUM_NODES"'  # in a batch script


def step_on_nodes(nodes: int | str, *words: str) -> list[str]:
    """Returns the command that starts a step with one task on each of ``nodes`` nodes of the job.

    Args:
        nodes: the number of nodes, or a shell word for it.
        words: further options of srun, followed by the command of the task.
    """
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *words]


def python(cluster: ClusterConfig, container: Container | None = None) -> str:
    """Returns the interpreter on the nodes, or in the container."""
    if cluster.python:
        return cluster.python
    return sys.executable if container is None else "python"


def python_lines(cluster: ClusterConfig) -> list[str]:
    """Returns bash lines that end the job if its interpreter does not exist on the first node."""
    name = shell_word(python(cluster))
    source = "cluster.python" if cluster.python else "the Python of the submission"
    return [
        f"if ! command -v {name} > /dev/null; then",
        f"""  echo "${{SLURMD_NODENAME:-$HOSTNAME}} has no "{name}", which is {source}" >&2""",
        "  echo '  fix:    cluster.python=PATH of the Python on the nodes that has hpc_train' >&2",
        "  exit 2",
        "fi",
    ]


def node_loss_options(survives: bool) -> tuple[str, ...]:
    """Returns the options of ``srun`` that keep (``survives``) or end the other agents when a node is lost."""
    options = ("--kill-on-bad-exit=0", "--wait=0")
    return ("--no-kill", *options) if survives else options


def _step(agent: Sequence[str], survives: bool, components: int, restarts: bool = True) -> list[str]:
    losses = "continue without it" if survives else "end too"
    starts = [step_on_nodes(NODES_OF_JOB)]
    if components > 1:
        starts = [["srun", *_on_component(0)], *map(_on_component, range(1, components))]
    step = []
    for start in starts:
        step += [f"  {' '.join(start)} \\", f"      {' '.join(node_loss_options(survives))} --unbuffered \\"]
        step += [*(f"      {line}" for line in agent[:-1]), f"      {agent[-1]} : \\"]
    step[-1] = f"      {agent[-1]} &"
    return [
        "# Each node runs one task, the agent, which starts one worker per GPU.",
        f"# If a node is lost, the agents of the other nodes {losses}.",
        "# If signals have killed all agents, no agent has recorded an end, and another step continues the run.",
        'rm -f "$end".node-* # left by an earlier run in the same allocation',
        "trap : INT # srun handles Ctrl-C",
        *(CORES_OF_COMPONENTS if components > 1 else []),
        f"for step in {'1 2 3' if restarts else 1}; do",
        *(NODES_LEFT if restarts and components == 1 else []),
        *step,
        *WAIT.splitlines(),
        '  if [ "$status" -le 128 ] || [ -n "$recorded$cancelled" ]; then break; fi',
        "done",
        "trap - INT",
    ]


NODES_LEFT = (
    "  # the job may have given nodes back",
    """  [ "$step" = 1 ] || SLURM_JOB_NUM_NODES=$(squeue -h -j "$job" -o %D || echo "$SLURM_JOB_NUM_NODES")""",
)
CORES_OF_COMPONENTS = (
    "# a step has the cores of the first component unless it asks for others, and the memory of its job",
    'unset SRUN_CPUS_PER_TASK "${!SLURM_MEM_PER_@}"',
    """fewest() { tr , '\\n' <<< "$1" | sort -n | head -n 1 | cut -d '(' -f 1; } # of 64(x2),32""",
)


def _on_component(number: int) -> list[str]:
    """Returns the options of srun that start a task with all cores on each node of a component of the job."""
    group = f"HET_GROUP_{number}"
    nodes = f'"$SLURM_JOB_NUM_NODES_{group}"'
    cores = f'"${{SLURM_CPUS_PER_TASK_{group}:-$(fewest "$SLURM_JOB_CPUS_PER_NODE_{group}")}}"'
    _, *words = step_on_nodes(nodes, f"--het-group={number}", f"--cpus-per-task={cores}")
    return words


REQUEUE_BEFORE = """\
# scancel also sends TERM to this script. A cancelled job is never requeued.
cancelled=
trap 'cancelled=yes' TERM
# Slurm sends the signal of --signal=B:USR1@SECONDS to this script alone, which passes it on to the agents as USR2.
announced=0
trap 'announced=1' USR1 USR2

# the prefix of the files in which the agents record how this start of the job ended, and the id of the job
end="$RUN/attempts/end-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
""".rstrip()

FIRST_BEFORE = """\
# Several jobs are submitted for this run, and the first to start trains it: $FIRST is a link that only one of them can
# make, to a file with its id. The others exit. Those that are still pending are cancelled.
for wait in 0 1 5 20; do
  sleep "$wait"
  { echo "$job" > "$FIRST.$job" && ln "$FIRST.$job" "$FIRST"; } 2> /dev/null
  first=$(cat "$FIRST" 2> /dev/null)
  [ -z "$first" ] || break
done
rm -f "$FIRST.$job"
if [ -z "$first" ]; then
  echo "$FIRST cannot be created, so this job does not start the run" >&2
  exit 1
fi
[ "$first" = "$job" ] || exit 0
[ ! -s "$FIRST.jobs" ] || scancel $(grep -vx "$job" "$FIRST.jobs") 2> /dev/null
""".rstrip()

EXPEDITED = """\
# Slurm requeues and holds a job with --requeue=expedite that fails on healthy nodes; this script cancels such a job
trap '[ $? -eq 0 ] || [ -e "$end.requeue" ] || scancel --state=RUNNING "$job"' EXIT
""".rstrip()

REQUEUE_END = """\
# The agents record the exit code; the exit code of srun only shows that something failed.
[ "$status" -eq 0 ] || status=1
for known in 1 2 93 75 0; do
  if grep -qsx "$known" "$end".node-*; then status=$known; break; fi
done
failed=$(sed -n 's/^command //p' "$end".node-* 2> /dev/null | tail -n 1) || true # the exit code of run.command
case $status in 1 | 2 | 93) status=${failed:-$status} ;; esac
""".rstrip()

REQUEUE_AFTER = """\
# If the job stopped before its time limit or because of a preemption, this script requests a requeue once, unless the
# job is cancelled (`incomplete` also checks that), is held (priority 0), or is already being requeued by Slurm.
if [ "$status" -eq 75 ] && [ -e "$end.requeue" ] && [ -z "$cancelled" ]; then
  for wait in 0 5 10 20 40 60 60 60 60 120 120; do
    sleep "$wait"
    state=$(squeue --noheader --jobs="$job" --format='%T %Q') && break
  done
  if [[ "$state" == RUNNING* && "$state" != *" 0" && -z "$cancelled" ]]; then
    trap '' TERM # Slurm ends this script when it requeues the job, and scontrol must survive that
    if ! scontrol requeue incomplete "$job"; then
      echo "Slurm refuses to requeue the job. Resume the run with: python -m hpc_train resume $RUN" >&2
      exit 93
    fi
    # exclude nodes that have failed more than once; Slurm accepts the list once the job is pending again
    if [ -e "$end.exclude" ]; then
      for wait in 0 0.5 0.5 1 1; do
        sleep "$wait"
        if scontrol update JobId="$job" ExcNodeList="$(cat "$end.exclude")"; then break; fi
      done
    fi
  fi
fi
""".rstrip()


EXIT = 'rm -f "$end".node-*; exit "$status"'

ON_EVENT = """\
# run.on_event: the agents call this command, unless no agent is left to record the end of the job
if [ -z "$cancelled" ] && ! ls "$end".node-* &> /dev/null; then
  printf '{{"time": %s, "event": "failed", "node": "%s", "message": "%s"}}\\n' "$(date +%s)" \\
      "${{SLURMD_NODENAME:-$HOSTNAME}}" "no agent is left: srun ended with exit code $status" |
    HPC_TRAIN_RUN_DIR=$RUN timeout --kill-after=1 10 bash -c {command} ||
    echo "run.on_event failed for the end of the job" >&2
fi
""".rstrip()


def on_event_lines(command: str | None) -> list[str]:
    """Returns the lines that call ``run.on_event`` after the step of the agents if no agent has recorded an end."""
    if command is None:
        return []
    return ON_EVENT.format(command=shell_word(command)).splitlines()


BY_VARIABLES = """\
# The part of a batch script after `freeze`, for schedulers other than Slurm. The script starts `bash "$AGENT" N` on
# each node N, as its child $first on its node 0, and calls agents_end, which waits and exits.
HPC_TRAIN_RESTART=$(find "$RUN/attempts" -name "end-$HPC_TRAIN_JOB_ID.*.requeue" | wc -l)
HPC_TRAIN_LAUNCH=$(date +%s)
export HPC_TRAIN_RESTART HPC_TRAIN_LAUNCH
end="$RUN/attempts/end-$HPC_TRAIN_JOB_ID.$HPC_TRAIN_RESTART"
rm -f "$end".node-*
AGENT="$RUN/attempts/agent-$HPC_TRAIN_JOB_ID.$HPC_TRAIN_LAUNCH.sh"
{
  declare -px PATH "${!HPC_TRAIN_@}" "${!PYTHON@}"
  echo 'export HPC_TRAIN_NODE_RANK=$1'
  printf 'cd %q && exec %q -m hpc_train agent %q\n' "$PWD" "$(command -v python)" "$RUN"
} > "$AGENT"

agents_end() { # exits with $1 if the job is to run again, by default 75
  for signal in TERM USR1 USR2; do # a scheduler may signal this script alone
    trap "kill -$signal $first 2> /dev/null" "$signal"
  done
  trap "kill -TERM $first 2> /dev/null" INT # Ctrl-C and bkill; children in the background ignore SIGINT
  until ls "$end".node-* &> /dev/null || [ -z "$(jobs -pr)" ]; do sleep 1 || true; done
  for ((second = 0; second < 60; second++)); do # an agent may be busy with the command that requeues the job
    [ -n "$(jobs -pr)" ] || break
    sleep 1 || true
  done
  kill -KILL $(jobs -pr) 2> /dev/null
  status=1
REQUEUE_END
  if [ "$status" -eq 75 ] && [ -e "$end.asked" ]; then status=${1:-75}; fi
  rm -f "$end".node-* "$AGENT"
  exit "$status"
}
""".replace("REQUEUE_END", REQUEUE_END).rstrip()


CHAIN_BEFORE = """\
# This job is part of a chain. It exits if the run has ended in an earlier job, or if an earlier job was cancelled.
[ ! -e "$CHAIN.over" ] || exit 0
if [ -s "$CHAIN" ] && squeue --noheader --states=CANCELLED --jobs="$(paste -sd, "$CHAIN")" | grep -q .; then
  scancel $(cat "$CHAIN")
  exit 75
fi
saved=$(ls "$RUN/checkpoints")
""".rstrip()

CHAIN_AFTER = """\
# The next job of the chain continues the run if this job has stopped, has reached its time limit or was preempted.
if scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; then
  cancelled=
elif scontrol show job "$SLURM_JOB_ID" | grep -q 'Reason=TimeLimit'; then
  cancelled=
  if [ "$saved" = "$(ls "$RUN/checkpoints")" ]; then cancelled=yes; fi # the next job would not make progress either
elif [ ! -e "$end.requeue" ]; then
  cancelled=yes
elif [ -e "$end.exclude" ]; then # exclude nodes that have failed more than once
  for next in $(grep -vx "$SLURM_JOB_ID" "$CHAIN"); do
    scontrol update JobId="$next" ExcNodeList="$(cat "$end.exclude")" || true
  done
fi
if [ -n "$cancelled" ]; then # done, failed, given up, or cancelled: the other jobs have nothing to do
  : > "$CHAIN.over"
  others=$(grep -vx "$SLURM_JOB_ID" "$CHAIN") && scancel $others
fi
rm -f "$end".node-*; exit "$status"
""".rstrip()


def chain_file(run: RunDirectory) -> Path:
    """Returns the file for the job ids of the next chain, one id per line."""
    return run.attempts / f"chain-{len(run.record().get('submissions', [])):03d}"

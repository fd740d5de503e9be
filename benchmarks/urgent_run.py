"""How long an urgent run waits while a long one holds all nodes, and what that costs the long one.

``python -m benchmarks.urgent_run DIR`` starts a Slurm of four nodes on this machine (``slurm/devcluster``), and three
times the same two runs: under the order of the queue, under ``elastic.priority`` with ``elastic.grow``, and under
Slurm's preemption by requeue. It prints a table and writes ``DIR/results.json``, which ``docs/pictures.py`` draws.
``--only POLICY ...`` measures some of them; policies that the file has already are not measured again.

A rank sleeps for each sample, so a step takes a time in proportion to the samples of a rank, whatever else the machine
does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hpc_train.run.directory import RunDirectory
from tests.slurm.cluster import Cluster, running
from tests.slurm.runs import SLOW, events, every_step, steps

NODES = 4
URGENT_NODES = 2
SAMPLE_S = 0.1
STEPS = {"long": 1200, "urgent": 150}
URGENT_AT = 300  # the step of the long run at which the urgent one is submitted
LOOK_S = 1.0  # between two looks at the queue
LONGEST_S = 3600.0  # of one policy
ENDS = ("finished", "failed", "stopped_retrying")
POLICIES: dict[str, dict[str, list[str]]] = {  # what each run adds to its command
    "order of submission": {},
    "elastic.priority, elastic.grow": {
        "long": ["elastic.min_nodes=1", "elastic.grow=always", f"elastic.max_nodes={NODES}"],
        "urgent": ["elastic.priority=1"],
    },
    "PreemptMode=REQUEUE": {"long": ["cluster.partition=preempt"]},
}


@dataclass(frozen=True)
class Result:
    """Holds what was measured under a policy. Times are seconds from the start of the long run.

    Attributes:
        load: the load average of the machine at the beginning and at the end.
        submitted: when the urgent run was submitted.
        started: when its agents started its first attempt.
        ended: when each run was done.
        repeated: how many steps of the long run were taken more than once.
        step_s: the median time of a step of the long run on all nodes, which shows what else the machine did.
        held: the nodes that each run held, with its joiners, as (begin, end, nodes).
    """

    load: tuple[float, float]
    submitted: float
    started: float
    ended: dict[str, float]
    repeated: int
    step_s: float
    held: dict[str, list[tuple[float, float, int]]]

    def node_minutes(self, name: str) -> float:
        return sum((end - begin) * nodes for begin, end, nodes in self.held[name]) / 60


def measure(cluster: Cluster, folder: Path, added: dict[str, list[str]]) -> Result:
    """Runs both runs to their end. Raises RuntimeError if one of them fails."""
    commands: dict[str, subprocess.Popen[str]] = {}
    runs = {name: folder / "outputs" / name for name in STEPS}

    def submit(name: str, nodes: int) -> None:
        case = ["batch.micro_size=1", f"+model.args.seconds={SAMPLE_S}", f"train.steps={STEPS[name]}"]
        place = [f"cluster.nodes={nodes}", "cluster.cpu_workers=1", "cluster.exclusive=true", "cluster.time=30"]
        how = ["cluster.preflight=off", "launch.detach=true", f"run.name={name}", "-m"]
        commands[name] = cluster.start(*SLOW, *case, *place, *added.get(name, []), *how, cwd=folder)

    began_load = os.getloadavg()[0]
    submit("long", NODES)
    looks: list[tuple[float, Counter[str]]] = []
    until = time.monotonic() + LONGEST_S
    while not all(run.exists() and events(run, *ENDS) for run in runs.values()):
        if time.monotonic() > until:
            raise RuntimeError(f"not done after {LONGEST_S:g} s: {folder}")
        held: Counter[str] = Counter()
        for line in cluster.call("squeue", "--noheader", "--states=RUNNING", "--format=%j %D").stdout.splitlines():
            name, nodes = line.split()
            held[name.removesuffix("-joiner")] += int(nodes)
        looks.append((time.time(), held))
        if "urgent" not in commands and runs["long"].exists() and max(steps(runs["long"]), default=0) >= URGENT_AT:
            submit("urgent", URGENT_NODES)
        time.sleep(LOOK_S)
    for name, run in runs.items():
        output, _ = commands[name].communicate()
        if not events(run, "finished"):
            raise RuntimeError(f"{name} has failed: {events(run, *ENDS)}\n{output}")

    zero = events(runs["long"], "started")[0]["time"]
    spans: dict[str, list[tuple[float, float, int]]] = {name: [] for name in runs}
    since_start = [(max(0.0, at - zero), held) for at, held in looks]
    for (begin, held), (end, _) in pairwise(since_start):
        for name, parts in spans.items():
            if parts and (parts[-1][1], parts[-1][2]) == (begin, held[name]):
                parts[-1] = parts[-1][0], end, held[name]
            elif held[name] and end > 0:
                parts.append((begin, end, held[name]))
    record = json.loads((runs["urgent"] / "run.json").read_text())
    taken = every_step(runs["long"])
    return Result(
        load=(began_load, os.getloadavg()[0]),
        submitted=record["submissions"][0]["time"] - zero,
        started=events(runs["urgent"], "started")[0]["time"] - zero,
        ended={name: events(run, "finished")[-1]["time"] - zero for name, run in runs.items()},
        repeated=len(taken) - len(set(taken)),
        step_s=step_on_all_nodes(runs["long"]),
        held=spans,
    )


def step_on_all_nodes(run: Path) -> float:
    lines = RunDirectory(run).read_metrics()
    return median(line["step_s"] for line in lines if line["world_size"] == NODES and line["step_s"] is not None)


def table(results: dict[str, Result]) -> str:
    """Returns the results as a table in Markdown."""
    lines = [
        "| Policy | The urgent run waits | ends after its submission | The long run ends | Steps repeated "
        "| Node-minutes: long, urgent | Its step on four nodes | Load average |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, result in results.items():
        waits = result.started - result.submitted
        ends = result.ended["urgent"] - result.submitted
        used = ", ".join(f"{result.node_minutes(name):.1f}" for name in STEPS)
        load = " to ".join(f"{value:.0f}" for value in result.load)
        cells = [policy, f"{waits:.0f} s", f"{ends:.0f} s", f"{result.ended['long']:.0f} s", str(result.repeated)]
        lines.append(f"| {' | '.join([*cells, used, f'{result.step_s:.2f} s', load])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY")
    options = parser.parse_args()
    file = options.folder / "results.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    results = {policy: Result(**values) for policy, values in stored.items()}
    with running() as cluster:
        for number, policy in enumerate(POLICIES):
            if policy in options.only and policy not in results:
                folder = options.folder / str(number)
                folder.mkdir(parents=True)
                results[policy] = measure(cluster, folder, POLICIES[policy])
                file.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()

"""The network environment of all workers of a job, decided by the rendezvous server from the facts of all nodes.

``fabric.json`` in the run directory records what the decision is based on, for rank 0 and for people:

    fabric        the network in use: cpu, one_node, efa, slingshot, infiniband, roce, ethernet, unknown
    gpus_per_node
    machines
        for each distinct machine: ``facts`` of its first node (``NodeFacts.to_json``); ``gpu_nics``: the NIC, path and
        rail of each GPU; ``bindings``: the CPUs of each local rank as a list like 0-3,8 or null, with the reason;
        ``rate_gbps``: the sum over its usable ports, null if unknown
    nodes
        for each node in the order of rank: ``name``, the index of its ``machine``, and its own facts
        (``machines.local_facts``), on one line
    environment   the variables that all workers export: name, value, reason
    not_set       common variables that were not set: name, reason
    warnings, unknown
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.elastic.nodes import Node
from hpc_train.elastic.rendezvous.messages import Start
from hpc_train.machine.network.decision import FabricDecision, FabricJob, decide, site_profile
from hpc_train.machine.network.facts import NodeFacts, Setting, by_machine, format_cpu_list, local_facts
from hpc_train.machine.network.nccl_settings import different_versions, lowest_nccl, merged, warnings
from hpc_train.machine.network.rails import different_rails, match, port_warnings, rate_gbps, sick_lines
from hpc_train.machine.network.rank_binding import bindings
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.files import write_text

DUMP_FILES = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # new name and old name, which torch reads


@dataclass
class Fabric:
    """Decides and records the network environment.

    Attributes:
        local_variables: variables that node 0 set for its own workers, with reasons.
    """

    run: RunDirectory
    config: Config
    local_variables: Sequence[dict[str, str]]
    _reported: tuple[FabricDecision, tuple[str, ...]] | None = field(default=None, init=False)

    def decide(self, start: Start, events: EventLog) -> dict[str, str]:
        """Returns the variables that all workers of an attempt export; reports and records them if they changed."""
        facts = [node.facts for node in start.nodes]
        settings, messages = merged({node.name: node.facts.settings for node in start.nodes})
        gpus = min(node.gpus for node in start.nodes)
        profile = site_profile(self.config.cluster.fabric)
        decision = decide(facts, FabricJob(len(facts), gpus, lowest_nccl(facts), profile), settings)
        messages = [*messages, *warnings(settings), *(_warnings(facts) if gpus else ()), *different_versions(facts)]
        now = decision, (*messages, *(node.name for node in start.nodes))
        if now != self._reported:
            self._reported = now
            self._write(start, gpus, decision, messages, settings, events)
            self._print(decision, messages, events, quiet=len(facts) == 1 and not gpus)
        variables = {variable.name: variable.value for variable in decision.variables}
        if gpus and DUMP_FILES.isdisjoint(settings):
            return variables | self._dump_file(events.attempt)
        return variables

    def _dump_file(self, attempt: int) -> dict[str, str]:
        """Returns the variable with the beginning of the file names to which torch writes NCCL's flight recorder when a
        collective times out; it appends the rank. By default, the files stay in a cache on each node.
        """
        path = self.run.logs.absolute() / "stacks" / f"nccl-{attempt:03d}-rank-"
        with suppress(OSError):  # then torch prints the records to the log
            path.parent.mkdir(exist_ok=True)
        return {"TORCH_FR_DUMP_TEMP_FILE": str(path)}

    def _write(
        self,
        start: Start,
        gpus: int,
        decision: FabricDecision,
        messages: list[str],
        settings: dict[str, Setting],
        events: EventLog,
    ) -> None:
        ranks = min(start.layout.world_size, *(node.workers for node in start.nodes))
        common = asdict(decision)
        environment = common.pop("variables")
        machines = [_machine(alike[0], ranks) for alike in by_machine(node.facts for node in start.nodes)]
        decided = {"gpus_per_node": gpus, "environment": environment, "warnings": messages} | common
        text = _text(decided | {"machines": machines}, _by_node(start.nodes))
        events.writer.put(self.run.fabric, lambda again: write_text(self.run.fabric, text))
        set_already = [
            {"name": name, "value": setting.value, "reason": f"set by {setting.source}"}
            for name, setting in settings.items()
            if name not in {row["name"] for row in self.local_variables}
        ]
        record = {
            "environment": [*self.local_variables, *environment, *set_already],
            "not_set": common["not_set"],
            "fabric": decision.fabric,
        }
        events.record(self.run, **record)

    def _print(self, decision: FabricDecision, messages: list[str], events: EventLog, quiet: bool) -> None:
        for message in messages:
            events.write("warning", message=message)
            print(f"warning: {message}", flush=True)
        if quiet:  # run.json records it
            return
        print(f"network between nodes: {decision.fabric}")
        for variable in decision.variables:
            print(f"  set {variable.name}={variable.value}: {variable.reason}")
        for alone in decision.not_set:
            print(f"  not set {alone.name}: {alone.reason}")
        for note in decision.unknown:
            print(f"  unknown: {note}", flush=True)


def _machine(facts: NodeFacts, ranks: int) -> dict[str, Any]:
    bound = [
        {"cpus": None if binding.cpus is None else format_cpu_list(binding.cpus), "reason": binding.reason}
        for binding in bindings(facts, ranks)
    ]
    return {
        "facts": facts.to_json(),
        "gpu_nics": [asdict(matched) for matched in match(facts)],
        "bindings": bound,
        "rate_gbps": rate_gbps(facts),
    }


def _by_node(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Returns the name, machine and own facts of each node."""
    machines = by_machine(node.facts for node in nodes)
    number = {id(alike[0].results): index for index, alike in enumerate(machines)}
    numbered = ((node, number[id(node.facts.results)]) for node in nodes)
    return [{"name": node.name, "machine": at} | local_facts(node.facts, machines[at][0]) for node, at in numbered]


def _text(common: dict[str, Any], nodes: Sequence[dict[str, Any]]) -> str:
    """Returns the JSON text with one line per node."""
    lines = ",\n    ".join(json.dumps(node) for node in nodes)
    return f'{json.dumps(common, indent=2).removesuffix("}").rstrip()},\n  "nodes": [\n    {lines}\n  ]\n}}\n'


def _warnings(nodes: Sequence[NodeFacts]) -> list[str]:
    ports = [f"{facts.node}: {warning}" for facts in nodes for warning in port_warnings(facts)]
    sick = sick_lines(nodes) if len(nodes) > 1 else ()
    gpus = [f"{facts.node}: {gpu.name}: {problem}" for facts in nodes for gpu in facts.gpus for problem in gpu.problems]
    locking = [
        f"{facts.node}: {facts.limits.locking}: RDMA NICs cannot register their buffers"
        for facts in nodes
        if facts.nics and facts.limits.locking
    ]
    return [
        *sick,
        *gpus,
        *ports,
        *locking,
        *(f"GPUs and NICs are matched differently: {line}" for line in different_rails(nodes)),
    ]

"""Decides the network environment of all workers of a job, in the rendezvous server, from the facts of all nodes.

``fabric.json`` in the run directory records what the decision is based on, for rank 0 and for people. An attempt on one
node has the same in ``attempts/NNN.json``, under the key ``fabric``:

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
        of_one_node: what ``fabric.json`` would have, after a decision for one node; None after one for several.
    """

    run: RunDirectory
    config: Config
    local_variables: Sequence[dict[str, str]]
    of_one_node: dict[str, Any] | None = field(default=None, init=False)
    _reported: tuple[FabricDecision, tuple[str, ...]] | None = field(default=None, init=False)

    def decide(self, start: Start, events: EventLog) -> dict[str, str]:
        """Returns the variables that all workers of an attempt export; reports and records them if they changed."""
        facts = [node.facts for node in start.nodes]
        settings, messages = merged({node.name: node.facts.settings for node in start.nodes})
        gpus = min(node.gpus for node in start.nodes)
        profile = site_profile(self.config.cluster.fabric)
        job = FabricJob(len(facts), gpus, lowest_nccl(facts), profile, has_stages=start.layout.pp > 1)
        decision = decide(facts, job, settings)
        messages = [*messages, *warnings(settings), *(_warnings(facts) if gpus else ()), *different_versions(facts)]
        now = decision, (*messages, *(node.name for node in start.nodes))
        if now != self._reported:
            self._reported = now
            self._write(start, gpus, decision, messages, settings, events)
            for message in messages:
                events.write("warning", message=message)
                print(f"warning: {message}", flush=True)
            if gpus or len(facts) > 1:  # otherwise run.json records it
                print(f"network between nodes: {decision.fabric}")
                for variable in decision.variables:
                    print(f"  set {variable.name}={variable.value}: {variable.reason}")
                for unset in decision.not_set:
                    print(f"  not set {unset.name}: {unset.reason}")
                for note in decision.unknown:
                    print(f"  unknown: {note}", flush=True)
        variables = {variable.name: variable.value for variable in decision.variables}
        if gpus and DUMP_FILES.isdisjoint(settings):
            # the beginning of the names of the files to which torch writes NCCL's flight recorder when a collective
            # times out; it appends the rank. By default, the files stay in a cache on each node
            path = self.run.logs.absolute() / "stacks" / f"nccl-{events.attempt:03d}-rank-"
            with suppress(OSError):  # then torch prints the records to the log
                path.parent.mkdir(exist_ok=True)
            variables["TORCH_FR_DUMP_TEMP_FILE"] = str(path)
        return variables

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
        machines = []
        nodes = {}  # one line of JSON for each
        for number, alike in enumerate(by_machine(node.facts for node in start.nodes)):
            first = alike[0]
            bound = [
                {"cpus": None if binding.cpus is None else format_cpu_list(binding.cpus), "reason": binding.reason}
                for binding in bindings(first, ranks)
            ]
            gpu_nics = [asdict(matched) for matched in match(first)]
            machine = {"facts": first.to_json(), "gpu_nics": gpu_nics, "bindings": bound, "rate_gbps": rate_gbps(first)}
            machines.append(machine)
            for facts in alike:
                nodes[id(facts)] = {"machine": number} | local_facts(facts, first)
        decided = {"gpus_per_node": gpus, "environment": environment, "warnings": messages} | common
        decided["machines"] = machines
        rows = [{"name": node.name} | nodes[id(node.facts)] for node in start.nodes]
        self.of_one_node = decided | {"nodes": rows} if len(rows) == 1 else None
        if self.of_one_node is None:
            head = json.dumps(decided, indent=2).removesuffix("}").rstrip()
            lines = ",\n    ".join(map(json.dumps, rows))
            text = f'{head},\n  "nodes": [\n    {lines}\n  ]\n}}\n'
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


def _warnings(nodes: Sequence[NodeFacts]) -> list[str]:
    messages = [*sick_lines(nodes)] if len(nodes) > 1 else []
    for facts in nodes:
        messages += [f"{facts.node}: {gpu.name}: {problem}" for gpu in facts.gpus for problem in gpu.problems]
    for facts in nodes:
        messages += [f"{facts.node}: {warning}" for warning in port_warnings(facts)]
    for facts in nodes:
        if facts.nics and facts.limits.locking:
            messages.append(f"{facts.node}: {facts.limits.locking}: RDMA NICs cannot register their buffers")
    return messages + [f"GPUs and NICs are matched differently: {line}" for line in different_rails(nodes)]

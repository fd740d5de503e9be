"""Runs the preflight alone, for ``doctor --measure``: on this machine, or on all nodes of the allocation."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_train.bench.measuring import run_benchmark
from hpc_train.bench.request import WorkerRequest
from hpc_train.config.schema import Config
from hpc_train.config.values import with_all_workers
from hpc_train.launch.gpus import gpus_of_this_job
from hpc_train.launch.script import container_of, python, step_on_nodes
from hpc_train.machine.allocation import current_allocation, workers_per_node
from hpc_train.run.exits import Exit
from hpc_train.schedulers.slurm.variables import Receiver, environment_for

ENTRY = "hpc_train.bench.worker:run_preflight"


def measure_nodes(config: Config, as_json: bool) -> int:
    """Runs the full preflight on this machine or on the nodes of this Slurm step, and prints the result on the first
    node.

    Returns:
        The exit code: 1 with an error among the findings.
    """
    nodes = current_allocation().nodes
    _, workers = workers_per_node(config.cluster)
    config = with_all_workers(config, nodes * workers)
    config = replace(
        config,
        cluster=replace(config.cluster, nodes=nodes, preflight="full", preflight_action="warn"),
        elastic=replace(config.elastic, spares=0, min_nodes=None),
    )
    code, result = run_benchmark(config, WorkerRequest(), ENTRY)
    if result is None:
        return code
    print(json.dumps(result) if as_json else "\n".join(_lines(result)), flush=True)
    if any(finding["level"] == "error" for finding in result["findings"]):
        return Exit.FAILED
    return Exit.DONE


def measure_allocation(nodes: int, config: Config, words: Sequence[str]) -> int:
    """Runs ``python -m hpc_train WORDS`` as one task on each node of this allocation; returns the exit code."""
    container = container_of(config, 0)
    inside = []
    if container is not None:
        inside = [*container.srun_options(container.seen()), *container.command(container.seen())]
    gpus = gpus_of_this_job()
    options = [*gpus.srun_options(gpus.per_node), *inside, python(config.cluster, container), "-m", "hpc_train"]
    step = step_on_nodes(nodes, "--overlap", "--unbuffered", *options, *words)
    return subprocess.run(step, env=environment_for(Receiver.INNER_STEP), check=False).returncode


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yields the measurements, then the findings with their fixes."""
    nodes = result["nodes"]
    yield f"preflight of {', '.join(nodes)} in {result['seconds']:.1f} s"
    yield f"devices: {', '.join(result['devices'])}"
    yield from _range("matrix products", result["gemm_tflops"], "TFLOP/s per rank")
    yield from _range("host to GPU", result["copy_gb_per_s"], "GB/s per rank")
    bus = result["bus_gb_per_s"]
    expected = result["expected_gb_per_s"]
    rates = {"in a node": [*bus["nodes"].values()], "over a rail": bus["rails"], "over all ranks": [bus["world"]]}
    for (where, measured), scope in zip(rates.items(), ("node", "rail", "world"), strict=True):
        expectation = expected[scope]
        of = f", expected {expectation['bus']:.4g} ({expectation['reason']})" if expectation else ""
        yield from _range(f"all-reduce {where}", measured, f"GB/s (bus bandwidth){of}")
    yield from _range("pairs of nodes", [*result["pairs_gb_per_s"].values()], "GB/s each way")
    yield from _range("clocks, relative to the first node", [*result["clock_offset_s"].values()], "s")
    if result["networks"]:
        yield f"network of NCCL: {', '.join(result['networks'])}"
    for finding in sorted(result["findings"], key=lambda finding: finding["level"]):
        yield f"{finding['level']:<8}{finding['message']}"
        yield f"        fix: {finding['fix']}"
    if not result["findings"]:
        yield "no problem found"


def _range(name: str, values: Sequence[float | None], unit: str) -> Iterator[str]:
    present = sorted(value for value in values if value is not None)
    if present:
        low, high = f"{present[0]:.4g}", f"{present[-1]:.4g}"
        yield f"{name}: {low if low == high else f'{low} to {high}'} {unit}"

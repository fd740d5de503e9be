"""Reads the summary that Jobstats, the monitoring of some sites, leaves in a job's AdminComment.

The comment is ``JS1:`` and base64 of compressed JSON. For each node it has ``gpu_utilization`` (percent, the mean over
the job), ``gpu_used_memory`` and ``gpu_total_memory`` (bytes, the highest use) by GPU, ``used_memory`` and
``total_memory`` of the host, ``cpus`` and ``total_time`` (CPU seconds); ``total_time`` at the top is the elapsed time
(github.com/PrincetonUniversity/jobstats).
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from hpc_train.units import format_bytes

PREFIX = "JS1:"


def describe_use(admin_comment: str) -> tuple[str, ...]:
    """Returns what Jobstats says about the use of GPUs, CPUs and memory; nothing for any other comment."""
    try:
        found = json.loads(gzip.decompress(base64.b64decode(admin_comment.removeprefix(PREFIX))))
        return tuple(_lines(found)) if admin_comment.startswith(PREFIX) else ()
    except (ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, ZeroDivisionError):  # e.g. JS1:Short
        return ()


def _lines(found: dict[str, Any]) -> Iterator[str]:
    nodes: dict[str, dict[str, Any]] = found["nodes"]
    used = {
        f"GPU {gpu} of {name}": float(share)
        for name, node in nodes.items()
        for gpu, share in node.get("gpu_utilization", {}).items()
    }
    if used:
        lowest = min(used, key=lambda name: used[name])
        yield f"Jobstats: GPU utilization {fmean(used.values()):.0f} % (lowest {used[lowest]:.0f} %, {lowest})"
        yield f"Jobstats: GPU memory {_fullest(nodes, 'gpu_used_memory', 'gpu_total_memory')}"
    held_s = sum(node["cpus"] for node in nodes.values()) * found["total_time"]
    share = sum(node["total_time"] for node in nodes.values()) / held_s
    fullest = max(nodes.values(), key=lambda node: node["used_memory"] / node["total_memory"])
    host = f"{format_bytes(fullest['used_memory'])} of {format_bytes(fullest['total_memory'])}"
    yield f"Jobstats: CPU utilization {100 * share:.0f} %, host memory of the fullest node {host}"


def _fullest(nodes: dict[str, dict[str, Any]], used: str, total: str) -> str:
    """Returns the use of the GPU with the largest share of its memory in use."""
    pairs = [(node[used][gpu], node[total][gpu]) for node in nodes.values() for gpu in node.get(used, {})]
    highest = max(pairs, key=lambda pair: pair[0] / pair[1])
    return f"{format_bytes(highest[0])} of {format_bytes(highest[1])} on the fullest"

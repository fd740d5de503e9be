"""The result of ``bench checkpoint`` in words and figures. No torch."""

from __future__ import annotations

from typing import Any

_WAYS = {
    "save": "save, until committed",
    "dcp_save": "plain dcp.save",
    "stall": "save in the background: stall",
    "durable": "  until committed",
    "dcp_stall": "plain dcp.async_save: stall",
    "dcp_durable": "  until written",
    "memcpy": "memcpy of the bytes",
    "hash": "xxh3-128 of the bytes",
    "verify": "verify",
    "load": "load",
    "dcp_load": "plain dcp.load",
}


def checkpoint_report(result: dict[str, Any]) -> str:
    """A line for each way, then the ratios of pairs."""
    lines = [
        f"{result['strategy']}: {result['layout']}",
        f"{result['bytes'] / 1e6:,.1f} MB in a checkpoint, {result['world_size']} x {result['device']}, "
        f"torch {result['torch']}, in {result['path']}",
        f"{result['rounds']} rounds in alternation; medians (5 % to 95 %), reads from the page cache",
        f"{'':<32}{'ms':>26}{'GB/s':>9}",
    ]
    for name, words in _WAYS.items():
        seconds = result["seconds"][name]
        span = f"({1e3 * seconds['p05']:,.1f} to {1e3 * seconds['p95']:,.1f})"
        speed = result["gb_per_s"][name]["median"]
        lines.append(f"{words:<32}{1e3 * seconds['median']:>8,.1f} {span:>17}{speed:>9.2f}")
    for name, ratio in result["ratio"].items():
        interval = f"(95 % interval {ratio['ci95_low']:.3f} to {ratio['ci95_high']:.3f})"
        lines.append(f"{name:<32}{ratio['median']:>8.3f} {interval}")
    return "\n".join(lines)

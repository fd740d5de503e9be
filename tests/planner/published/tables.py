"""Reads the tables of published measurements, and fills in what ``SOURCES.md`` knows beyond a row."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
Row = dict[str, str]
STATES_TFLOPS = "ml-engineering-h200-b200"
# What rows leave out and SOURCES.md knows: the defaults of litgpt and of torchtitan's configurations of Llama 3. The
# rows of bigscience-v100 keep attention scores, and some state the layers and the width of a GPT-2.
DEFAULTS = {
    "litgpt-thunder": {
        "seq": "2048", "micro_batch": "4", "precision": "bf16", "flash_attention": "1", "recompute": "none",
    },
    "torchtitan-asynctp": {"seq": "8192", "flash_attention": "1"},
    "llm-foundry": {"flash_attention": "1"},
    "bigscience-v100": {"heads": "64", "ffn": "32768", "vocab": "50304", "flash_attention": "1"},
    "bloom": {"heads": "96"},
    "torchtune": {"flash_attention": "1"},
}  # fmt: skip


@cache
def rows(name: str) -> list[Row]:
    with (HERE / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@cache
def models() -> dict[str, Row]:
    return {row["model"]: row for row in rows("models") if row["family"] in ("gpt", "llama") and row["ffn"]}


def completed(row: Row) -> Row:
    """Returns a row with what is known of its source, of bloom's models, and its rate if it states operations."""
    row = row | {name: value for name, value in DEFAULTS.get(row["source"], {}).items() if not row[name]}
    if row["source"] == STATES_TFLOPS:
        return row | {"tokens_per_s_per_gpu": str(float(row["tflops_per_gpu"]) * 1e12 / _causal_flops(row))}
    return row | _of_bloom(row) if row["source"] == "bloom" else row


def _of_bloom(row: Row) -> Row:
    """Returns the layers and the feed-forward width of a row of bloom.

    Where a table tells no layers, they were chosen so that stages are equal: they are the multiple of the stages whose
    size with or without the embedding is closest to the one in the model's name.
    """
    dim, stages = int(row["hidden"]), int(row["pp"])
    if row["layers"]:
        return {"ffn": str(4 * dim)}
    layer, table, size = 12 * dim**2, int(row["vocab"]) * dim, float(row["params"])
    off = {count: min(abs(count * layer + more - size) for more in (0, table)) for count in range(stages, 200, stages)}
    return {"ffn": str(4 * dim), "layers": str(min(off, key=lambda count: off[count]))}


def _causal_flops(row: Row) -> float:
    """Returns 6 N + 6 L h s, the operations per token of the convention ``6N+attention causal-halved``."""
    shape = {name: int(value) for name, value in models()[row["model"]].items() if value.isdecimal()}
    dim, layers = shape["hidden"], shape["layers"]
    layer = dim * (2 * dim * (1 + shape["kv_heads"] / shape["heads"]) + 3 * shape["ffn"])
    return 6 * (layers * layer + 2 * shape["vocab"] * dim) + 6.0 * layers * dim * int(row["seq"])


def split_of(row: Row, layers: int) -> str | list[int]:
    """Returns the layers of each stage. DeepSpeed fills one stage after the other up to the least maximum; where a note
    of bloom says so, the embedding counts as a layer of the first and of the last stage."""
    stages = int(row["pp"])
    if row["source"] != "bloom" or stages == 1:
        return "even"
    table = int("|embed" in row["context"] or "embedding counted" in row["notes"])
    most, left, counts = -(-(layers + 2 * table) // stages), layers, []
    for stage in range(stages):
        counts.append(min(left, most - table * (stage == 0)))
        left -= counts[-1]
    return counts

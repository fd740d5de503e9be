"""The collected measurements are well formed, and every figure stands in the text that the row quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import urlparse

import pytest

from tests.planner.published.tables import HERE, Row, rows

WHOLE = ["gpus", "gpus_per_node", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"]
WHOLE += ["dp", "tp", "pp", "cp", "ep", "virtual_stages", "micro_batch", "global_batch"]
MEASURED = ["memory", "step_s", "tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu"]
CHOICES = {
    "family": {"gpt", "llama", "bert", "moe", "hybrid", "vit", "resnet", "convnext"},
    "zero_stage": {"", "0", "1", "2", "3"},
    "schedule": {"", "1f1b", "interleaved", "gpipe"},
    "precision": {"", "bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4"},
    "recompute": {"", "none", "selective", "full"},
    "offload": {"", "0", "1"},
    "flash_attention": {"", "0", "1"},
    "compile": {"", "0", "1"},
    "memory_unit": {"", "GiB", "GB"},
    "memory_kind": {"", "allocated", "reserved", "nvidia-smi", "reported peak"},
    "oom": {"0", "1"},
    "held_out": {"0", "1"},
}
RANGES = {
    "memory": (1, 192),
    "step_s": (1e-4, 2000),
    "tokens_per_s_per_gpu": (1, 1e6),
    "samples_per_s": (0.1, 1e6),
    "tflops_per_gpu": (0.5, 4000),
    "mfu": (0.01, 0.95),
}


PUBLISHED, RANKINGS, HARDWARE, MODELS = map(rows, ("published", "rankings", "hardware", "models"))


def numbers(text: str) -> list[float]:
    """Return the numbers of a quote. A comma may separate thousands or columns, and ``24k`` is 24,000 as well."""
    plain = re.findall(r"\d+(?:\.\d+)?", text)
    thousands = re.findall(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", text)
    return [float(n.replace(",", "")) for n in plain + thousands] + [
        1000 * float(n) for n in re.findall(r"(\d+)k\b", text)
    ]


def scales(column: str, row: Row) -> Iterator[float]:
    """Yield what a quoted number may be multiplied by: sources print ms, percent, MiB, and totals of all GPUs."""
    yield 1.0
    if column == "step_s":
        yield 1e-3
    if column == "mfu":
        yield 1e-2
    if column == "memory":
        yield 1 / 1024
    if column == "tokens_per_s_per_gpu" and row["gpus"]:
        yield 1 / int(row["gpus"])


def stands_in_quote(column: str, row: Row) -> bool:
    value = float(row[column])
    quoted = numbers(row["quote"])
    return any(abs(number * scale - value) <= 1e-4 * value for number in quoted for scale in scales(column, row))


def faults(row: Row) -> Iterator[str]:
    """Yield what is wrong with one row of published.csv."""
    address = urlparse(row["url"])
    if address.scheme != "https" or not address.netloc or not row["quote"].strip() or not row["gpu"]:
        yield "no address, quote or GPU"
    yield from (f"{column} = {row[column]!r}" for column, allowed in CHOICES.items() if row[column] not in allowed)
    yield from (f"{c} = {row[c]!r}" for c in WHOLE if row[c] and not re.fullmatch(r"[1-9]\d*", row[c]))
    measured = [column for column in MEASURED if row[column]]
    yield from (f"{c} = {row[c]} is out of range" for c in measured if not in_range(c, row[c]))
    yield from (f"the quote has no {c} = {row[c]}" for c in measured if not stands_in_quote(c, row))
    if row["oom"] == "1" and (measured or "oom" not in row["quote"].lower()):
        yield "an out-of-memory row measures something, or its quote does not say so"
    if row["oom"] == "0" and not measured:
        yield "nothing is measured"
    if bool(row["memory"]) != bool(row["memory_unit"] and row["memory_kind"]):
        yield "memory needs a unit and a kind"
    if all(row[axis] for axis in ("gpus", "dp", "tp", "pp", "cp")) and ranks(row) != int(row["gpus"]):
        yield "dp x tp x pp x cp is not the number of GPUs"


def in_range(column: str, text: str) -> bool:
    low, high = RANGES[column]
    return low <= float(text) <= high


def ranks(row: Row) -> int:
    return int(row["dp"]) * int(row["tp"]) * int(row["pp"]) * int(row["cp"])


def test_every_row_is_well_formed_and_its_figures_are_quoted() -> None:
    wrong = [f"line {n}: {fault}" for n, row in enumerate(PUBLISHED, start=2) for fault in faults(row)]
    assert not wrong, "\n".join(wrong[:20])


ADDED_LATER = {"chenyaofo-zero", "deepspeed-autotuning"}  # after the first fit, which had seen their neighbors


def test_every_third_source_is_set_aside() -> None:
    keys = sorted({row["source"] for row in PUBLISHED} - ADDED_LATER)
    held_out = {row["source"] for row in PUBLISHED if row["held_out"] == "1"}
    assert held_out == set(keys[2::3])
    assert all(row["held_out"] == str(int(row["source"] in held_out)) for row in [*PUBLISHED, *RANKINGS])


def test_every_source_is_described() -> None:
    text = (HERE / "SOURCES.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^### `([^`]+)`", text, re.MULTILINE))
    assert described == {row["source"] for row in PUBLISHED}


def test_rankings_name_the_best_candidate() -> None:
    assert len(RANKINGS) >= 15
    assert len({row["case"] for row in RANKINGS}) == len(RANKINGS)
    for row in RANKINGS:
        candidates: dict[str, float] = json.loads(row["candidates"])
        best = min if row["better"] == "lower" else max
        assert len(candidates) > 1, row["case"]
        assert row["winner"] == best(candidates, key=lambda name: candidates[name]), row["case"]
        for value in candidates.values():
            assert stands_in_quote(row["metric"], row | {row["metric"]: str(value)}), row["case"]


def test_hardware_figures_are_quoted() -> None:
    for row in HARDWARE:
        value = float(row["value"])
        assert row["url"].startswith("https://") and row["unit"] and row["kind"] in {"table", "measured"}, row
        product = re.fullmatch(r"(\d+) x (\d+) Gbit/s per node", row["scope"])
        quoted = numbers(row["quote"])
        if product:
            count, rate = int(product[1]), int(product[2])
            assert value == count * rate and {count, rate} <= set(quoted), row
        else:
            assert value in quoted, row
    shipped = {"A100-40GB", "A100-80GB", "H100-80GB", "H200", "B200", "MI250X", "MI300X", "V100", "L40S"}
    for quantity in ("memory", "hbm_bandwidth", "power", "fp16_tflops"):
        assert shipped <= {row["gpu"] for row in HARDWARE if row["quantity"] == quantity}, quantity


def gpt_parameters(shape: Row, positions: int) -> int:
    """Return 12 L h^2 of the blocks and h for each token of the vocabulary and each position."""
    layers, hidden, vocab = (int(shape[column]) for column in ("layers", "hidden", "vocab"))
    return 12 * layers * hidden**2 + (vocab + positions) * hidden


def test_shapes_give_the_stated_parameters() -> None:
    """MPT prints exact counts; BLOOM's candidates are named by theirs."""
    shapes = {row["model"]: row for row in MODELS}
    assert len(shapes) == len(MODELS)
    for row in (row for row in PUBLISHED if row["source"] == "llm-foundry"):
        assert gpt_parameters(shapes[row["model"]], int(row["seq"])) == pytest.approx(int(row["params"]), rel=0.01)
    for row in (row for row in PUBLISHED if row["source"] == "bloom" and row["layers"] and row["params"]):
        assert gpt_parameters(row, positions=0) == pytest.approx(int(row["params"]), rel=0.02), row["quote"]


def flops_per_token(shape: Row, row: Row) -> float:
    """Return 6N + 12 L h s (half of the attention where the source counts causally), N without the input embedding."""
    layers, hidden, heads, kv_heads, ffn, vocab = (
        int(shape[column]) for column in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    )
    matrices = 3 if shape["family"] == "llama" else 2
    block = 2 * hidden**2 * (1 + kv_heads / heads) + matrices * hidden * ffn
    attention = 12 * layers * hidden * int(row["seq"])
    half = row["flop_convention"].endswith("causal-halved")
    return 6 * (layers * block + vocab * hidden) + attention / (2 if half else 1)


def test_speed_and_flops_agree_with_the_convention() -> None:
    """Tokens per second times the FLOPs per token of the stated convention give the quoted TFLOP/s within 4 %."""
    shapes = {row["model"]: row for row in MODELS if row["ffn"]}
    stated = [row for row in PUBLISHED if row["tokens_per_s_per_gpu"] and row["tflops_per_gpu"] and row["seq"]]
    stated = [row for row in stated if row["model"] in shapes and row["flop_convention"].startswith("6N+attention")]
    assert len({row["source"] for row in stated}) >= 5
    for row in stated:
        rate = float(row["tokens_per_s_per_gpu"]) * flops_per_token(shapes[row["model"]], row) / 1e12
        assert rate == pytest.approx(float(row["tflops_per_gpu"]), rel=0.04), row["quote"]

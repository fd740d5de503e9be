"""Predicts the published step times of mixtures of experts that compute in bf16 without tensor parallelism.

    python -m tests.planner.published.experts

Configurations are in the order of ``published.csv``; nothing is fitted to every second one (``set_aside``), whatever
release of the software was measured. Routers are forced to an even load, which the prediction assumes as well.
Megatron-Bridge does not state its recomputation, taken as none, nor whether it shards the optimizer, taken as ZeRO-1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from hpc_train.config.compose import compose, typed
from hpc_train.config.schema import Config
from hpc_train.layout.resolve import resolve_layout
from hpc_train.planner.machine import Machine
from hpc_train.planner.prediction import Prediction, predict_step
from tests.planner.published.comparison import config_of, machine_of
from tests.planner.published.tables import Row, rows

# gpt-oss as its model card states it (arXiv:2508.10925), without biases and sinks
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088, "dim": 2880, "n_heads": 64, "n_kv_heads": 8, "head_dim": 64, "ffn_dim": 2880,
    "sliding_window": 128, "global_every": 2, "moe.top_k": 4,
}  # fmt: skip
GPT_OSS_20B = _GPT_OSS | {"n_layers": 24, "moe.experts": 32}
GPT_OSS_120B = _GPT_OSS | {"n_layers": 36, "moe.experts": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3 MoE 30B": ("qwen3_30b_a3b", {}),
    "GPT-OSS 20B": ("mixtral_8x7b", GPT_OSS_20B),
    "GPT-OSS 120B": ("mixtral_8x7b", GPT_OSS_120B),
    "GPT OSS 120B": ("mixtral_8x7b", GPT_OSS_120B),
}
# what the benchmark configurations of Automodel state (examples/llm_benchmark, 2026): recomputation and ep
AUTOMODEL = {"Qwen3 MoE 30B": ("full", 8), "GPT-OSS 20B": ("none", 8), "GPT-OSS 120B": ("full", 64)}


@dataclass(frozen=True)
class Compared:
    """A row with its prediction; ``error`` is predicted / measured - 1 of the step time."""

    row: Row
    configuration: int
    prediction: Prediction

    @property
    def error(self) -> float:
        measured = float(self.row["tokens_per_s_per_gpu"]) * int(self.row["gpus"])
        return measured / self.prediction.tokens_per_s - 1

    @property
    def set_aside(self) -> bool:
        return self.configuration % 2 == 1


def compared() -> Iterator[Compared]:
    """Yields the rows that state all that a prediction needs."""
    known: list[tuple[str, ...]] = []
    names = ("source", "gpu", "model", "gpus", "pp", "ep", "micro_batch", "global_batch")
    for row in rows("published"):
        if row["model"] in MODELS and row["precision"] == "bf16" and row["tp"] == "1":
            configuration = tuple(row[name] for name in names)
            if configuration not in known:
                known.append(configuration)
            config = _config_of(row)
            machine = machine_of(row)
            yield Compared(row, known.index(configuration), _predicted(row, config, machine))


def _config_of(row: Row) -> Config:
    model, values = MODELS[row["model"]]
    recompute, ep = AUTOMODEL.get(row["model"], ("none", int(row["ep"] or 1)))
    words = [f"model.{name}={value}" for name, value in values.items()]
    composed = typed(compose([f"model={model}", "data=synthetic", "precision=bf16", *words]))
    shape = {"hidden": "1", "layers": "1", "ffn": "1", "heads": "1", "kv_heads": "1", "vocab": "1", "family": "llama"}
    virtual = row["virtual_stages"] if row["virtual_stages"] != "1" else ""
    stated = {"recompute": recompute, "zero_stage": row["zero_stage"] or "1", "virtual_stages": virtual}
    config = config_of(row | stated, shape)
    vocabulary = composed.model.vocab_size  # type: ignore[attr-defined]
    return replace(
        config,
        model=composed.model,
        data=replace(config.data, vocab_size=vocabulary),  # type: ignore[call-arg]
        strategy=replace(config.strategy, ep=ep, pp_split="even"),
        train=replace(config.train, compile=True),  # their norms, activations and rotary positions are fused kernels
    )


def _predicted(row: Row, config: Config, machine: Machine) -> Prediction:
    per_node = int(row["gpus_per_node"])
    devices = int(row["gpus"])
    layout = resolve_layout(config, max(1, devices // per_node), min(devices, per_node))
    return predict_step(config, layout, machine)


def main() -> None:
    print("| Source | Model | GPUs | Layout | Tokens/s per GPU | Predicted | Error | Set aside |")
    print("|---|---|---|---|---|---|---|---|")
    for each in compared():
        row = each.row
        speed = each.prediction.tokens_per_s / int(row["gpus"])
        cells = [row["source"], row["model"], f"{row['gpus']} {row['gpu']}", str(each.prediction.layout)]
        cells += [row["tokens_per_s_per_gpu"], f"{speed:.0f}", f"{each.error:+.0%}", "yes" if each.set_aside else ""]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

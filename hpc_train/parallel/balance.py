"""``strategy.pp_split=flops|measured``: the layers of each stage follow from what the blocks cost.

Found once, written to ``pp_split.json`` in the run directory, and taken from there by every later attempt that has as
many stages. Names of parameters are global, so a checkpoint of any split fits any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.config.errors import ConfigError
from hpc_train.config.layout import Layout
from hpc_train.config.model_size import values_per_parameter
from hpc_train.config.schema import Config
from hpc_train.config.stages import place_stages
from hpc_train.data.batch import Batch
from hpc_train.data.dataset import Dataset
from hpc_train.data.feed import example_micro_batch
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.batch_statistics import has_batch_statistics
from hpc_train.parallel.block_costs import BlockCost, block_names, block_parameters, measure_blocks
from hpc_train.parallel.mesh import Mesh
from hpc_train.parallel.partition import Prediction, blocks_of, in_flight, layers_of, partition, predict
from hpc_train.parallel.precision import parameter_dtype
from hpc_train.parallel.split import split_layers
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json, write_json

FILE = "pp_split.json"
USABLE = 0.9  # of a GPU's memory; the rest is for workspaces and fragmentation
_WHERE = "strategy.pp_split"


@dataclass(frozen=True)
class SplitPlan:
    """A split, and what it is made of.

    Attributes:
        how: ``flops`` or ``measured``.
        layers: of each stage.
        even: what the even split promises; None where there are fewer layers than stages.
        reused: taken from the run directory.
    """

    how: str
    layers: tuple[range, ...]
    blocks: tuple[BlockCost, ...]
    predicted: Prediction
    even: Prediction | None
    reused: bool = False

    def as_json(self) -> dict[str, Any]:
        """For the run directory and the event log."""
        return {
            "how": self.how,
            "layers": [len(held) for held in self.layers],
            "blocks": [asdict(block) for block in self.blocks],
            "predicted": asdict(self.predicted) | {"imbalance": self.predicted.imbalance},
            "even": None if self.even is None else asdict(self.even) | {"imbalance": self.even.imbalance},
        }

    def in_words(self) -> str:
        """One line for the log."""
        stages = "|".join(str(len(held)) for held in self.layers)
        text = f"pipeline split ({self.how}{', of an earlier attempt' * self.reused}): layers {stages}, "
        text += f"slowest stage {self.predicted.imbalance:.2f} x the mean, bubble {self.predicted.bubble_share:.1%}"
        if self.even is not None:
            text += f"; even: {self.even.imbalance:.2f} x, {self.even.bubble_share:.1%}"
        return text


def plan_split(config: Config, mesh: Mesh, dataset: Dataset, run: RunDirectory | None = None) -> SplitPlan | None:
    """The split of this attempt, the same on every rank; None where the config itself says it. Collective.

    Args:
        dataset: gives the shape of a micro-batch.
        run: where a split is looked for and written; None: it is found anew.

    Raises:
        ConfigError: the model does not say what its blocks cost, or no split fits into memory.
    """
    how = config.strategy.pp_split
    if mesh.layout.pp == 1 or how not in ("flops", "measured"):
        return None
    model = build_model(config.model, config.train.seed)
    if not isinstance(model, Model):
        return None  # it has no layers to split: ``build_engine`` says so
    known = _read(config, mesh, len(model.layers), run)
    if known is not None:
        return _plan(how, known[0], known[1], mesh.layout, reused=True)
    example = example_micro_batch(dataset, mesh.layout, mesh.device)
    blocks = _measured(config, mesh, model, example) if how == "measured" else _counted(model, example)
    plan = _plan(how, _partition(config, mesh, blocks), blocks, mesh.layout)
    if run is not None and mesh.rank == 0:
        write_json(run.path / FILE, {"stages": mesh.layout.stages} | plan.as_json())
    return plan


def _counted(model: Model, example: Batch) -> tuple[BlockCost, ...]:
    flops = model.block_flops(example.inputs)
    if flops is None:
        raise ConfigError(
            f"{type(model).__name__} does not say how many operations its blocks take (block_flops)",
            where=_WHERE,
            mend="strategy.pp_split=measured, or one number of layers per stage",
        )
    return tuple(map(BlockCost, block_names(model), flops, block_parameters(model)))


def _measured(config: Config, mesh: Mesh, model: Model, example: Batch) -> tuple[BlockCost, ...]:
    if has_batch_statistics(model):
        raise ConfigError(
            "the blocks of a model with batch statistics cannot be measured one by one: they wait for all ranks",
            where=_WHERE,
            mend="strategy.pp_split=even, or one number of layers per stage",
        )
    return measure_blocks(config, mesh, model, example)


def _partition(config: Config, mesh: Mesh, blocks: Sequence[BlockCost]) -> tuple[range, ...]:
    layout, cap = mesh.layout, _memory_cap(mesh)

    def fits(stage: int, held: range) -> bool:
        of_stage = [blocks[block] for block in held]
        trains = any(block.parameters for block in of_stage)
        return trains and (cap is None or stage_bytes(config, layout, stage, of_stage) <= cap)

    found = partition([block.seconds for block in blocks], layout.stages, fits)
    if found is None:
        raise ConfigError(
            f"no split into {layout.stages} stages fits {(cap or 0) / 2**30:.1f} GiB for each stage",
            where=_WHERE,
            mend="a smaller batch.micro_size, train.activation_checkpointing=full, or more stages (strategy.pp)",
        )
    return layers_of(found)


def stage_bytes(config: Config, layout: Layout, stage: int, blocks: Sequence[BlockCost]) -> int:
    """Bytes that a stage of ``blocks`` needs at most: parameters, gradients, optimizer state and activations."""
    kind, shard = layout.data_parallel, layout.shard if layout.dp > 1 else 1
    sharded = {"zero1": (1, 1, shard), "zero2": (1, shard, shard), "zero3": (shard, shard, shard)}
    shares = sharded.get(kind, (1, 1, 1))
    copies = (1, 1, values_per_parameter(config.optim))
    values = sum(block.parameters for block in blocks) * parameter_dtype(config.precision.name).itemsize
    state = sum(values * number // share for number, share in zip(copies, shares, strict=True))
    micro = in_flight(layout.schedule, stage, layout.stages, layout.micro_batches)
    return state + micro * sum(block.activation_bytes for block in blocks)


def _memory_cap(mesh: Mesh) -> int | None:
    """Bytes for one stage, by the smallest GPU of the run; None on the CPU, whose memory the ranks share."""
    if mesh.device.type != "cuda":
        return None
    smallest = torch.tensor(torch.cuda.get_device_properties(mesh.device).total_memory)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=mesh.control)
    return int(USABLE * int(smallest)) // mesh.layout.stages_per_rank


def _plan(
    how: str, layers: tuple[range, ...], blocks: tuple[BlockCost, ...], layout: Layout, reused: bool = False
) -> SplitPlan:
    seconds = [block.seconds for block in blocks]
    placement = place_stages(layout.pp, layout.stages_per_rank, layout.schedule)

    def prediction(split: tuple[range, ...]) -> Prediction:
        return predict(seconds, blocks_of(split), placement, layout.micro_batches)

    n_layers = len(blocks) - 2
    even = prediction(split_layers(n_layers, layout.stages)) if n_layers >= layout.stages else None
    return SplitPlan(how, layers, blocks, prediction(layers), even, reused)


def _read(
    config: Config, mesh: Mesh, n_layers: int, run: RunDirectory | None
) -> tuple[tuple[range, ...], tuple[BlockCost, ...]] | None:
    """Layers and blocks of an earlier attempt, where they fit this one; as rank 0 finds them."""
    found: list[dict[str, Any] | None] = [None]
    if run is not None and mesh.rank == 0 and (run.path / FILE).exists():
        found = [read_json(run.path / FILE)]
    dist.broadcast_object_list(found, src=0, group=mesh.control)
    plan, wanted = found[0], (config.strategy.pp_split, mesh.layout.stages, n_layers)
    if plan is None or (plan["how"], plan["stages"], sum(plan["layers"])) != wanted:
        return None
    layers = split_layers(n_layers, mesh.layout.stages, plan["layers"])
    return layers, tuple(BlockCost(**block) for block in plan["blocks"])

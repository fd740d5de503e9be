"""``Trainer`` of torchtitan with its Llama 3, of our sizes and weights.

torchtitan takes GPUs for granted: without one, ``Trainer`` fails in ``torch.cuda.set_device`` ("module 'torch._C' has
no attribute '_cuda_setDevice'"). Here its device is the CPU, and a stand-in replaces the monitor of the GPU's memory.
All else is its own: the trainer's step, FSDP (which it also uses for replicas and for one rank), the optimizer, the
schedule of the learning rate. Attention is SDPA with a causal mask, since FlexAttention would compile for the CPU; its
samples have one document. Recomputation is off, as with all contenders. On several ranks ``spmd_backend`` is
``partial_dtensor``: with its default, ``spmd_types``, ``fully_shard`` of torch 2.13 refuses the model ("When
dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh"). FSDP sums gradients with ``SUM``,
since gloo lacks the ``PREMUL_SUM`` of torchtitan's divisor, and pipelines get a ``step`` that torch 2.13 lacks.
"""

from __future__ import annotations

import gc
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.peers.case import Case, Contender, batches
from benchmarks.peers.contenders import installed
from benchmarks.peers.hf_trainer import hf_weights
from hpc_train.config.schema import Config
from hpc_train.parallel.mesh import Mesh

MOST_STEPS = 1_000_000


def build_titan(case: Case, config: Config, mesh: Mesh) -> Contender:
    take_the_cpu()
    trainer = _trainer(config, mesh)
    gc.enable()  # the trainer has disabled it for all contenders
    parts, layout = trainer.model_parts, mesh.layout
    for part in parts:
        _sum_over_gloo(part)
        _fill(part, trainer.model_config, config)
    if layout.pp > 1:
        _take_micro_batches(trainer.pp_schedule)
    is_last = layout.pp == 1 or trainer.pp_has_last_stage
    share = is_last / layout.tp  # ranks of tensor parallelism have the same loss
    losses: list[Tensor] = []
    plain = trainer.forward_backward_step
    trainer.forward_backward_step = lambda **options: losses.append(plain(**options).detach()) or losses[-1]
    feed = trainer.batch_generator(trainer.dataloader)

    def turn() -> Tensor:
        losses.clear()
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(feed)
        return torch.stack(losses).sum() * share

    size = torch.tensor(sum(each.numel() for part in parts for each in part.parameters()))
    dist.all_reduce(size)
    return Contender(turn, int(size) // (layout.world_size // layout.pp))


def _sum_over_gloo(part: nn.Module) -> None:
    """Makes FSDP sum gradients where torchtitan's divisor of 1 would need ``PREMUL_SUM``, which only NCCL has."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _take_micro_batches(schedule: Any) -> None:
    """Lets ``schedule.step`` take inputs that are split, as torchtitan calls it; that of torch 2.13 splits them."""
    if "arg_mbs" in signature(schedule.step).parameters:
        return

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
    ) -> None:
        for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
            stage.has_backward = True
            stage.clear_runtime_states()
        inputs = arg_mbs or [()] * len(kwarg_mbs)
        schedule._step_microbatches(inputs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedule.step = step


def take_the_cpu() -> None:
    """Replaces the device of torchtitan; before its other modules are imported, which copy these names."""
    tools = installed("torchtitan.tools.utils")
    tools.device_type, tools.device_module = "cpu", torch.cpu
    logging.getLogger().setLevel(logging.WARNING)
    metrics = installed("torchtitan.components.metrics")
    nothing = metrics.DeviceMemStats(*[0] * len(metrics.DeviceMemStats._fields))
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor


def _trainer(config: Config, mesh: Mesh) -> Any:
    module = installed("torchtitan.trainer")

    class InThisGroup(module.Trainer):  # type: ignore[misc, name-defined]
        """Joins the process group that the contenders share."""

        def init_distributed(self) -> Any:
            dims = installed("torchtitan.distributed").ParallelDims
            return dims.from_config(self.config.parallelism, mesh.layout.world_size)

    return InThisGroup(_trainer_config(config, mesh))


def _trainer_config(config: Config, mesh: Mesh) -> Any:
    configs = installed("torchtitan.config")
    components = "torchtitan.components"
    schedule = installed(f"{components}.optimizer").LRSchedulersContainer
    layout, sharded = mesh.layout, mesh.layout.data_parallel != "ddp"
    local_micro_batches = layout.micro_batches if layout.pp > 1 else 1  # of one call of the model or the schedule
    dtype = "bfloat16" if config.precision.name == "bf16" else "float32"
    return installed("torchtitan.trainer").Trainer.Config(
        model_spec=_model_spec(config),
        dump_folder=tempfile.mkdtemp(),
        loss=installed(f"{components}.loss").CrossEntropyLoss.Config(),
        optimizer=_optimizer(config),
        lr_scheduler=schedule.Config(warmup_steps=0, min_lr_factor=1.0),
        training=configs.TrainingConfig(
            local_batch_size=layout.micro_size * local_micro_batches,
            global_batch_size=config.batch.global_size,
            seq_len=config.data.sequence_length,
            steps=MOST_STEPS,
            max_norm=config.optim.clip_norm,
            mixed_precision_param=dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=configs.ParallelismConfig(
            data_parallel_replicate_degree=1 if sharded else layout.dp,
            data_parallel_shard_degree=layout.dp if sharded else 1,
            tensor_parallel_degree=layout.tp,
            context_parallel_degree=layout.cp,
            pipeline_parallel_degree=layout.pp,
            pipeline_parallel_schedule="Interleaved1F1B" if layout.stages > layout.pp else "1F1B",
            pipeline_parallel_layers_per_stage=config.model.n_layers // layout.stages,  # type: ignore[union-attr]
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            pipeline_parallel_microbatch_size=layout.micro_size,
            spmd_backend="spmd_types" if layout.world_size == 1 else "partial_dtensor",
            fsdp_reshard_after_forward="never" if layout.data_parallel == "zero2" else "always",
        ),
        metrics=installed(f"{components}.metrics").MetricsProcessor.Config(log_freq=MOST_STEPS),
        activation_checkpoint=None,
        tokenizer=_tokenizer(),
        dataloader=_samples(config, mesh),
    )


def _optimizer(config: Config) -> Any:
    """Returns the config of AdamW, without weight decay for the norms."""
    module, optim = installed("torchtitan.components.optimizer"), config.optim
    same = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps}
    decays = (("norm", 0.0), (".*", optim.weight_decay))
    return module.OptimizersContainer.Config(
        param_groups=[
            module.ParamGroupConfig(
                pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**same, "weight_decay": decay}
            )
            for pattern, decay in decays
        ]
    )


def _model_spec(config: Config) -> Any:
    llama, common = installed("torchtitan.models.llama3"), installed("torchtitan.models.common")
    attention = installed("torchtitan.models.common.attention")
    model = config.model
    ours = partial(nn.init.normal_, std=0.02)  # replaced by our weights
    rope = common.ComplexRoPE.Config(
        dim=model.dim // model.n_heads, max_seq_len=config.data.sequence_length, theta=model.rope_theta
    )
    layers = llama._build_llama3_layers(
        n_layers=model.n_layers, dim=model.dim, n_heads=model.n_heads, n_kv_heads=model.n_kv_heads,
        hidden_dim=model.ffn_dim, rope=rope, attn_backend="flex",
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    sizes = llama.Llama3Model.Config(
        dim=model.dim,
        vocab_size=model.vocab_size,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=model.vocab_size, embedding_dim=model.dim, param_init={"weight": ours}
        ),
        norm=common.RMSNorm.Config(normalized_shape=model.dim, param_init={"weight": nn.init.ones_}),
        lm_head=common.Linear.Config(in_features=model.dim, out_features=model.vocab_size, param_init={"weight": ours}),
        layers=layers,
    )
    for norm in (sizes.norm, *(each for layer in layers for each in (layer.attention_norm, layer.ffn_norm))):
        norm.eps = model.norm_eps
    spec = installed("torchtitan.protocols.model_spec").ModelSpec
    pipelined = installed("torchtitan.distributed.pipeline_parallel").pipeline_llm
    return spec(
        name="llama3", flavor="ours", model=sizes, parallelize_fn=llama.parallelize_llama, pipelining_fn=pipelined,
        post_optimizer_build_fn=None, state_dict_adapter=llama.Llama3StateDictAdapter,
    )  # fmt: skip


def _fill(model: nn.Module, sizes: Any, config: Config) -> None:
    """Gives ``model``, which may be a stage and sharded, the weights with which all contenders begin."""
    whole = sizes.build()
    adapter = installed("torchtitan.models.llama3").Llama3StateDictAdapter(sizes, None)
    found = whole.load_state_dict(adapter.from_hf(hf_weights(config)), strict=False)
    assert not found.unexpected_keys and not any("weight" in key for key in found.missing_keys), found
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, target in model.named_parameters():
            value = values[name]
            if isinstance(target, DTensor):
                share = distribute_tensor(value, target.device_mesh, target.placements)
                target.to_local().copy_(share.to_local())
            else:
                target.copy_(value)


def _samples(config: Config, mesh: Mesh) -> Any:
    base = installed("torchtitan.components.dataloader").BaseDataLoader

    class Samples(base):  # type: ignore[misc, valid-type]
        """The micro-batches that the other contenders get."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for micro_batches in batches(own_config, mesh):
                for batch in micro_batches:
                    positions = torch.arange(batch.inputs.shape[1]).expand_as(batch.inputs)
                    context = {"positions": positions} if mesh.layout.cp > 1 else {}  # which is split with the inputs
                    yield {"input": batch.inputs, **context}, batch.targets

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    own_config = config
    return Samples.Config()


def _tokenizer() -> Any:
    base = installed("torchtitan.components.tokenizer").BaseTokenizer

    class NoTokenizer(base):  # type: ignore[misc, valid-type]
        """The samples are tokens already."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *_: Any, **__: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            raise NotImplementedError

    return NoTokenizer.Config()

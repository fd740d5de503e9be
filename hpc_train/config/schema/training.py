"""The keys of the groups ``strategy``, ``optim``, ``train`` and ``batch``, which determine the computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpc_train.config.schema.key import NOT_DEBUGGED, any_of, group, key, required, unless, when

ADAMW = (when("optim.name", "adamw"), when("optim._target_", None))


@dataclass
class StrategyConfig:
    """How the model and the batch are split over the ranks. The world size is dp x pp x cp x tp."""

    name: str = key(
        "single",
        "The name of the strategy. With auto, the planner chooses all keys whose value is auto when the run is "
        "submitted.",
    )
    dp: int | str = key(
        1,
        "The number of data-parallel replicas or ZeRO ranks. fill uses all ranks that pp, cp and tp leave.",
        choices=("fill",),
        at_least=1,
    )
    pp: int | str = key(
        1,
        "The number of pipeline ranks. auto uses 2 on one node; on several, the fewest (at least 2) whose stages fit "
        "into the memory of a GPU. fill uses all ranks that dp leaves.",
        choices=("auto", "fill"),
        at_least=1,
    )
    tp: int | str = key(
        1,
        "The number of tensor-parallel ranks. They are always on the same node. auto: strategy=auto chooses.",
        choices=("auto",),
        at_least=1,
    )
    cp: int = key(
        1,
        "The number of context-parallel ranks, which share the tokens of each sample. It must divide the sequence "
        "length and, with strategy.context=ulysses, the attention heads.",
        at_least=1,
    )
    context: str = key(
        "ulysses",
        "How context-parallel ranks compute attention of whole sequences. ulysses exchanges heads for tokens; ring "
        "passes keys and values around a ring, for which twice strategy.cp must divide the sequence length; both "
        "exchanges heads between as many ranks of a node as the heads permit, and forms rings of the others.",
        choices=("ulysses", "ring", "both"),
        when=unless("strategy.cp", 1),
    )
    ep: int | str = key(
        1,
        "The number of expert-parallel ranks. They are consecutive ranks of a pipeline stage, and each holds a part of "
        "the experts of a layer. It must divide model.moe.experts and the ranks of a stage, dp x cp x tp. auto: "
        "strategy=auto chooses.",
        choices=("auto",),
        at_least=1,
    )
    async_tp: bool = key(
        False,
        "Whether compiled tensor-parallel layers overlap their collectives with adjacent matrix products. It needs "
        "train.compile=true, GPUs that reach each other's memory (NVLink) and cluster.visible_gpus=all.",
    )
    data_parallel: str = key(
        "ddp",
        "How data-parallel ranks synchronize: a built-in kind or package.module:ROW. auto: strategy=auto chooses.",
        when=when("replicas"),
    )
    shard: int | str = key(
        "fill",
        "The number of ranks over which ZeRO shards its state, and with strategy.local_steps of a replica. fill uses "
        "all of dp x cp; node uses the ranks of a node. auto: strategy=auto chooses.",
        choices=("fill", "node", "auto"),
        at_least=1,
        when=any_of(when("shards"), unless("strategy.local_steps", None)),
    )
    local_steps: int | None = key(
        None,
        "The number of steps after which replicas of strategy.shard ranks exchange their weights (DiLoCo). Between "
        "these outer steps each replica trains by itself on its part of the batch. null sums gradients over all ranks "
        "in each step.",
        at_least=1,
    )
    outer_lr: float = key(
        0.7,
        "The learning rate of the outer step. 1 with strategy.outer_momentum=0 averages the weights.",
        above=0,
        when=unless("strategy.local_steps", None),
    )
    outer_momentum: float = key(
        0.9,
        "The Nesterov momentum of the outer step.",
        at_least=0,
        below=1,
        when=unless("strategy.local_steps", None),
    )
    schedule: str = key(
        "1f1b", "The pipeline schedule: auto, a built-in schedule or package.module:ROW.", when=when("pipeline")
    )
    stages_per_rank: int | str = key(
        1,
        "Pipeline stages per pipeline rank. auto: strategy=auto chooses.",
        choices=("auto",),
        at_least=1,
        when=when("pipeline"),
    )
    pp_split: Any = key(
        "even",
        "How layers are assigned to stages. even gives all stages the same number, flops balances by the model's "
        "FLOPs, measured profiles every block before the first step. A list gives the layers of each stage.",
        choices=("even", "flops", "measured"),
        when=when("pipeline"),
    )
    bucket_cap_mb: float | None = key(
        None,
        "The size of a gradient bucket of ddp and allreduce, and of the messages of an outer step. null is 25 on CPUs "
        "and 100 on GPUs. `bench step` measures sizes.",
        above=0,
        unit="MB",
        when=any_of(when("buckets"), unless("strategy.local_steps", None)),
    )
    comm: str = key(
        "default",
        "How ZeRO communicates. separate scatters gradients on a separate communicator, so that they do not queue "
        "behind gathers of parameters; it needs torch 2.13. user_buffers allocates the messages in memory that NCCL "
        "has registered, which it sends without copies.",
        choices=("default", "separate", "user_buffers"),
        when=when("shards"),
    )
    compression: str = key(
        "none",
        "How ddp and allreduce compress gradients; ZeRO supports only bf16. `bench step` measures the techniques.",
        choices=("none", "fp16", "bf16", "powersgd", "topk"),
        when=when("replicas"),
    )
    compression_share: float = key(
        0.01,
        "topk: the share of each gradient's elements that is sent.",
        above=0,
        at_most=1,
        when=(when("strategy.compression", "topk"), when("replicas")),
    )
    compression_rank: int = key(
        4,
        "powersgd: the rank of the approximation.",
        at_least=1,
        when=(when("strategy.compression", "powersgd"), when("replicas")),
    )
    offload: str = key(
        "none",
        "What is kept in host memory. all adds parameters and gradients to the optimizer state and requires zero2 or "
        "zero3.",
        choices=("none", "optimizer", "all"),
    )
    for_nodes: dict[str, Any] = key(
        {},
        "The layouts for other numbers of nodes, which strategy=auto writes into the frozen config: by number of nodes "
        "the keys that differ, such as `{'2': {strategy: {pp: 1}}}`; null where no layout fits.",
    )


@dataclass
class OptimConfig:
    """Configures the optimizer and its learning rate schedule."""

    name: str = key(
        "adamw", "The optimizer, unless _target_ is set, which custom requires.", choices=("adamw", "sgd", "custom")
    )
    _target_: str | None = key(
        None,
        "Any subclass of torch.optim.Optimizer, or a function that returns one: package.module.Name. It is called with "
        "the parameters, lr and weight_decay if its signature has them, and args.",
    )
    args: dict[str, Any] = key({}, "The other keyword arguments of _target_.")
    elementwise: bool | None = key(
        None,
        "Whether _target_ computes each element of a parameter from that element, its gradient and its state alone. If "
        "so, ranks update their shards. Otherwise one rank of those that share a parameter updates the whole "
        "parameter. null is true for the optimizers of torch.optim that do so, and false for others.",
    )
    state_per_parameter: float | None = key(
        None,
        "The number of values that _target_ keeps per parameter, for memory estimates. null uses the number of the "
        "optimizer for torch.optim, and 2 for others.",
        at_least=0,
        when=unless("optim._target_", None),
    )
    groups: dict[str, Any] = key(
        {},
        "Groups of parameters with separate settings. NAME.match: a regular expression that is searched "
        "in the names of the parameters; the first group that matches applies. lr_factor: the factor of the learning "
        "rate. weight_decay: the weight decay of all parameters of the group. args: arguments of the optimizer. "
        "_target_, elementwise: another optimizer.",
    )
    lr: float = key(3e-3, "The highest learning rate.", above=0)
    lr_scaling: str = key(
        "none", "How lr grows with the ratio of batch.global_size to base_batch.", choices=("none", "linear", "sqrt")
    )
    base_batch: int = key(
        256,
        "The global batch size for which lr was chosen, for lr_scaling.",
        at_least=1,
        when=unless("optim.lr_scaling", "none"),
    )
    weight_decay: float = key(
        0.1, "The weight decay of parameters of at least two dimensions: not of biases and norms.", at_least=0
    )
    betas: list[float] = key(
        [0.9, 0.95], "adamw: the decay rates of the two moments, each at least 0 and below 1.", when=ADAMW
    )
    eps: float = key(1e-8, "adamw: the epsilon in the denominator.", above=0, when=ADAMW)
    moments: str = key(
        "fp32",
        "adamw: the number format of the two moments. Under precision fp64 they are fp64.",
        choices=("fp32", "bf16"),
        when=ADAMW,
    )
    momentum: float = key(
        0.9, "sgd: the momentum.", at_least=0, below=1, when=(when("optim.name", "sgd"), when("optim._target_", None))
    )
    clip_norm: float = key(1.0, "The largest global gradient norm. 0 disables clipping.", at_least=0)
    in_backward: bool = key(
        False,
        "Whether each parameter is updated during the backward pass, as soon as its gradient is known, and the "
        "gradient is freed. For single and dp, and for cp with data_parallel=ddp or allreduce; with one micro-batch "
        "per step and without clipping.",
    )
    schedule: Any = key(
        "cosine",
        "The learning rate schedule: a built-in one, the import path of a custom one, or the path with arguments as "
        "{_target_: package.module.name, args: {...}}. A custom one is a function of the step that returns a factor of "
        "lr, or a scheduler class as in torch.optim.lr_scheduler.",
    )
    warmup_steps: int = key(
        20,
        "Steps in which the learning rate rises linearly from 0. A custom schedule must include its own warm-up.",
        at_least=0,
        unit="steps",
        when=when("optim.schedule", "constant", "linear", "cosine", "wsd"),
    )
    min_lr_ratio: float = key(
        0.1,
        "The last learning rate as a share of the highest.",
        at_least=0,
        at_most=1,
        when=when("optim.schedule", "linear", "cosine", "wsd"),
    )
    decay_share: float = key(
        0.2,
        "wsd: the share of the steps in which the rate decays.",
        at_least=0,
        at_most=1,
        when=when("optim.schedule", "wsd"),
    )


@dataclass
class VerifyConfig:
    """Finds wrong numbers that no error reports: see docs/howto/corruption.md."""

    every: int | str | None = key(
        None,
        "Verifies each N-th step: it runs twice, on the same rank or by turns on another replica's, and the bits are "
        "compared; so are the weights and the optimizer states of replicas. Updates are repeated, too. auto chooses N "
        "so that this takes 1 % of the time. null never verifies.",
        choices=("auto",),
        at_least=1,
        unit="steps",
        when=when("optim.in_backward", False),
    )


@dataclass
class TrainConfig:
    """Configures the training loop."""

    seed: int = key(0, "The seed of initial weights, data order, dropout and augmentation.", at_least=0)
    steps: int | None = key(
        None, "The number of optimizer steps. conf/ sets 150 unless train.epochs is given.", at_least=1, unit="steps"
    )
    epochs: float | None = key(None, "The length of training in epochs. It replaces train.steps.", above=0)
    eval_every: int = key(0, "Steps between evaluations. 0 evaluates only at the end.", at_least=0, unit="steps")
    eval_samples: int | str = key(
        "auto",
        "The most samples of each set that an evaluation reads, evenly spaced over the set. auto reads at most half as "
        "many as the whole run trains on, so that a short run does not spend most of its time in the evaluation; "
        "all has no limit. `evaluate RUN` always reads all.",
        choices=("auto", "all"),
        at_least=1,
        unit="samples",
    )
    activation_checkpointing: str = key(
        "auto",
        "Which activations are recomputed in the backward pass: none, full, selective (every second layer), "
        "selective:N (every N-th layer) or ops (all but matrix products and attention). A size such as 8GiB is a "
        "budget for what the layers of a rank keep: ops and full then apply to as few layers as necessary. auto is "
        "none, unless strategy=auto chooses.",
    )
    activation_offload: str = key(
        "none",
        "The size, such as 1MiB, from which tensors that layers save for the backward pass are kept in host memory. "
        "none keeps all of them on the device.",
    )
    loss_chunks: int | str = key(
        "auto",
        "The number of chunks into which the loss splits the tokens of a micro-batch. Only one chunk's logits are in "
        "memory. A GPT and the decoders of model=hf compute their gradients together with the loss; other models, and "
        "schedules that keep several micro-batches on the last stage, compute them a second time in the backward pass. "
        "1 keeps whole logits. auto is chunks of 4096 tokens or more for such a model with a large vocabulary, else 1.",
        choices=("auto",),
        at_least=1,
    )
    z_loss: float = key(
        0.0,
        "The coefficient of the z-loss of a language model: the mean of the squared logarithm of the softmax's "
        "normalizer is added to the training loss, which keeps the logits small. 1e-4 is usual; evaluations report the "
        "plain loss.",
        at_least=0,
    )
    compile: bool = key(
        False, "Whether each layer, the head's norm and the loss are compiled with torch.compile.", when=NOT_DEBUGGED
    )
    cuda_graphs: bool = key(
        False,
        "Whether compiled code runs as CUDA graphs, which take the time of one launch for all kernels of a layer. They "
        "pay where the GPU waits for the host: small models and micro-batches. Strategies single and dp support it.",
        when=when("train.compile", True),
    )
    attention: str = key(
        "auto",
        "The kernel of attention on GPUs, in bf16 or fp16. auto is the choice of PyTorch. fa3 (Hopper) and fa4 (Hopper "
        "and Blackwell) activate the kernels of the modules flash_attn_interface and flash_attn.cute.interface, also "
        "for packed documents. cudnn prefers cuDNN, except for packed documents.",
        choices=("auto", "fa3", "fa4", "cudnn"),
    )
    nonfinite_limit: int = key(
        50,
        "The number of consecutive steps without a finite gradient after which the run rolls back to a checkpoint. "
        "fp16 needs about 20 to find its loss scale.",
        at_least=1,
        unit="steps",
    )
    spike_mads: float = key(
        0.0,
        "Rolls back when the loss exceeds the running median by this many median absolute deviations. 0 disables it; "
        "20 is a reasonable value.",
        at_least=0,
    )
    max_rollbacks: int = key(
        3, "The number of rollbacks before the run fails. Each skips the samples of the bad steps.", at_least=0
    )
    debug: bool = key(
        False,
        "Runs 20 slow steps that report the first module with a nonfinite output and collectives that differ "
        "between ranks.",
    )
    reproducible: str | None = key(
        None,
        "any_world_size computes bitwise the same weights on any number of ranks, under strategy single and dp.",
        choices=("any_world_size",),
    )
    check: str = key(
        "auto",
        "Whether a model that is not built in is tested before the first step: whether its loss depends on the split "
        "of a batch or on padding, whether its forward pass writes to parameters that ZeRO shards, and whether its "
        "gradients equal those of one process. auto tests once for each code, config and version of torch; off never.",
        choices=("auto", "off"),
    )
    buffers: str = key(
        "refuse",
        "What happens to buffers that the forward pass changes and that differ between ranks, such as codebooks and "
        "queues. refuse ends the run in its first step. rank0 gives all ranks the values of rank 0 after each step, as "
        "DDP does; mean does so for integers, and averages other buffers. Neither computes what one process would. "
        "Batch statistics are always averaged.",
        choices=("refuse", "rank0", "mean"),
    )
    verify: VerifyConfig = group(VerifyConfig)
    threads: int | str = key("auto", "Intra-op CPU threads per rank.", choices=("auto",), at_least=1)


@dataclass
class BatchConfig:
    """Configures the batch size. The global batch size never depends on the world size."""

    global_size: int = key(32, "Samples per optimizer step.", at_least=1, unit="samples")
    micro_size: int | str = key("auto", "Samples per micro-batch and rank.", choices=("auto",), at_least=1)
    micro_batches: int | str = key(
        "auto",
        "Micro-batches per step and rank, for gradient accumulation or the pipeline.",
        choices=("auto",),
        at_least=1,
    )
    logical_micro_batches: int | str = key(
        "auto",
        "Micro-batches of a step under train.reproducible, which is also the largest number of ranks. auto uses 8.",
        choices=("auto",),
        at_least=1,
        when=unless("train.reproducible", None),
    )
    drop_last: bool = key(
        True,
        "Whether the incomplete batch at the end of an epoch is dropped instead of padded.",
        when=unless("data.kind", "stream"),
    )
    balance: bool = key(
        False,
        "Whether slow replicas hand whole micro-batches of a step to others, by measured times. Dropout then depends "
        "on the micro-batch instead of the rank.",
        when=when("replicas"),
    )
    loader_workers: int | str = key(
        "auto", "Data loader processes per rank.", choices=("auto",), at_least=0, when=NOT_DEBUGGED
    )


@dataclass
class PrecisionConfig:
    """Number formats. Parameters and optimizer state are in fp32, or in fp64 under fp64; see weights."""

    name: str = key("fp32", "The format of matrix products.", choices=("fp64", "fp32", "bf16", "fp16"))
    residual: str = key(
        "compute",
        "bf16, fp16: the format of the hidden states between layers and between pipeline stages, under every strategy: "
        "compute uses the format of matrix products; fp32 needs more memory, traffic and time.",
        choices=("compute", "fp32"),
        when=when("precision.name", "bf16", "fp16"),
    )
    tf32: bool = key(
        False,
        "Whether matrix products and convolutions of fp32 tensors use TF32 on GPUs, with 10 bits of precision instead "
        "of 23. It is several times faster; without it, fp32 gives the same results as on a CPU up to rounding.",
        when=when("gpus"),
    )
    weights: str = key(
        "fp32",
        "bf16: the format of the weights and of their gradients. If it is bf16, the optimizer updates fp32 master "
        "weights, which are sharded like its state. Checkpoints contain the master weights.",
        choices=("fp32", "bf16"),
        when=when("precision.name", "bf16"),
    )
    fp8: str | None = key(
        None,
        "bf16: the scales with which the matrix products of the layers are computed in fp8, by torchao: one per tensor "
        "(tensorwise), per row (rowwise) or per block of 32 values (mxfp8). CPUs emulate it. Requires hpc_train[fp8].",
        choices=("tensorwise", "rowwise", "mxfp8"),
    )
    fp8_skip: list[str] = key(
        [],
        "Regular expressions, such as attention: linear layers whose names match one of them stay in bf16. Linear "
        "layers outside the model's layers, frozen ones, and those whose sizes are not multiples of 16 (mxfp8: 32) "
        "stay in bf16 in any case.",
        when=unless("precision.fp8", None),
    )


@dataclass
class TargetConfig:
    """A class or function that is built by calling ``_target_`` with ``args``."""

    _target_: str = required("The class or function: package.module.Name.")
    args: dict[str, Any] = key({}, "The keyword arguments of _target_.")

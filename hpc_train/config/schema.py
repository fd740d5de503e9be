"""The typed schema of a run: one dataclass per config group.

OmegaConf reads these dataclasses as structured configs, so a misspelt key or a value of the wrong type fails when the
config is composed, on the login node. They hold no logic; what combinations are impossible is said in ``validate.py``
and how a layout follows from them in ``layout.py``. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ContainerConfig:
    """What a job on Slurm runs in. The interpreter is ``python`` of the image, or ``cluster.python``."""

    image: str | None = None  # a .sif file, or what apptainer or pyxis takes; null: the nodes themselves
    runtime: str = "auto"  # apptainer | pyxis | auto: pyxis where srun has it and the image is no .sif
    binds: list[str] = field(default_factory=list)  # /data or /data:/inside, besides runs, data and node-local space


@dataclass
class FabricConfig:
    """A site profile (``cluster/fabric=NAME``): what nobody can see of a network from its nodes."""

    name: str = "none"
    source: str | None = None  # where the values come from
    variables: dict[str, str] = field(default_factory=dict)  # {NCCL_CROSS_NIC: "0"}: of all workers, unless set already


@dataclass
class ClusterConfig:
    """Where a run goes."""

    kind: str = "auto"  # auto | local | slurm; auto takes Slurm where its controller answers
    nodes: int | str = 1  # on Slurm also a range, "2-4": starts with what is free
    gpus_per_node: int | str = "auto"  # auto: all of a node (Slurm: of the partition); 0: train on the CPU
    cpu_workers: int = 4  # ranks per node where there is no GPU
    preflight: str = "quick"  # quick | full | off: checks of several nodes before the first step; full: pairs always
    preflight_action: str = "warn"  # warn | stop: what a preflight does about what it finds
    # the rest is for Slurm; most keys are sbatch's options, and null leaves them to the site
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str = "01:00:00"
    time_min: str | None = None
    cpus_per_gpu: int | str = "auto"  # cores per rank; auto: the partition's default, else the node's share
    mem_per_gpu: str = "auto"  # memory per rank, as 64G; auto: the partition's default, else the node's share
    mem: str | None = None  # per node, instead of mem_per_gpu
    gpu_type: str | None = None  # as in --gpus-per-node=a100:4
    gres: str | None = None  # instead of --gpus-per-node where a site wants it: gpu:a100:4
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    switches: str | None = None  # 1@00:30:00: on one switch, if that takes no more than 30 minutes of waiting
    comment: str | None = None  # follows hpc_train:<run directory>
    job_name: str | None = None
    mail_user: str | None = None
    mail_type: str | None = None
    dependency: str | None = None
    nice: int | None = None
    begin: str | None = None
    wckey: str | None = None
    licenses: str | None = None
    clusters: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # any other option of sbatch: {hint: nomultithread}
    env: dict[str, str] = field(default_factory=dict)  # exported in the job, before setup
    setup: list[str] = field(default_factory=list)  # lines of bash before training: module load, conda activate
    teardown: list[str] = field(default_factory=list)  # lines of bash after it
    python: str | None = None  # the interpreter on the nodes; null: the one that submits
    fabric: FabricConfig = field(default_factory=FabricConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)


@dataclass
class StrategyConfig:
    """How a model and its batch are split over the ranks. World size = dp x pp x tp."""

    name: str = "single"
    dp: int | str = 1  # replicas (or ZeRO ranks), or "fill": all ranks that pp and tp leave
    pp: int | str = 1  # ranks in the pipeline; "auto": 2 on one node, else one per node; "fill": all that dp leaves
    tp: int = 1  # ranks that share each layer; kept inside a node
    data_parallel: str = "ddp"  # ddp | allreduce | zero1 | zero2 | zero3, or package.module:ROW
    shard: int | str = "fill"  # ranks one ZeRO state is sharded over: "fill" (all of dp), "node", or a number
    schedule: str = "1f1b"  # auto, a row of plan/techniques.py, or package.module:ROW
    stages_per_rank: int = 1  # pipeline stages held by each pp rank
    # even: as many layers for each stage; flops: by the model's own count; measured: by a profile of every block before
    # the first step; or the number of layers of each stage as a list
    pp_split: Any = "even"
    bucket_cap_mb: float | int | str = 25.0  # gradient bucket of ddp and allreduce; auto: found in the first steps
    compression: str = "none"  # none | fp16 | bf16 | powersgd | topk | auto (as measured); under ddp and allreduce
    compression_share: float = 0.01  # topk: of each gradient's elements, the largest
    compression_momentum: float = 0.0  # topk: momentum correction, in place of the optimizer's momentum
    compression_rank: int = 4  # powersgd
    compression_warmup_steps: int = 0  # the first steps, which are not compressed
    static_graph: bool = False  # ddp: promise that every step uses the same parameters
    offload: str = "none"  # none | optimizer | all (with parameters and gradients: zero2, zero3): kept in host memory


@dataclass
class GPTConfig:
    """A decoder-only transformer, Llama-style."""

    kind: str = "gpt"
    vocab_size: int = MISSING
    n_layers: int = MISSING
    dim: int = MISSING
    n_heads: int = MISSING
    n_kv_heads: int = MISSING
    ffn_dim: int = MISSING
    rope_theta: float = 10000.0
    # Llama 3.1's: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings; empty: none
    rope_scaling: dict[str, float] = field(default_factory=dict)
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    dropout: float = 0.0


@dataclass
class ViTConfig:
    """A vision transformer with a class token."""

    kind: str = "vit"
    image_size: int = MISSING
    patch_size: int = MISSING
    channels: int = 3
    n_classes: int = MISSING
    n_layers: int = MISSING
    dim: int = MISSING
    n_heads: int = MISSING
    mlp_dim: int = MISSING
    norm_eps: float = 1e-6
    dropout: float = 0.0


@dataclass
class CustomModelConfig:
    """Any ``nn.Module`` or model, built by ``_target_`` with ``args``."""

    kind: str = "custom"
    _target_: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)
    loss: str = "cross_entropy"  # cross_entropy | mse: of the outputs of a module without a method `loss` of its own
    sync_batch_norm: bool = False


@dataclass
class TextDataConfig:
    """Bytes of text files, split into train and validation by file."""

    kind: str = "text"
    path: str | None = None  # a file, a directory or a glob; null: the source of Python's standard library
    pattern: str = "**/*.py"  # files taken when path is a directory (or null)
    sequence_length: int = 256
    validation_share: float = 0.01  # of the files
    vocab_size: int = 256
    packing: bool = False  # whole files share a sequence, and none sees another; false: windows of the whole text


@dataclass
class TokensDataConfig:
    """Memory-mapped ``.bin`` files of token ids, as ``python -m hpc_train prepare`` writes them."""

    kind: str = "tokens"
    path: str = MISSING  # directory with train.bin, validation.bin and meta.json
    sequence_length: int = 1024
    vocab_size: int = MISSING
    packing: bool = False  # whole documents share a sequence, and none sees another; false: windows of the whole text


@dataclass
class CIFAR100DataConfig:
    """The official CIFAR-100 python-version directory."""

    kind: str = "cifar100"
    path: str = MISSING
    image_size: int = 32
    channels: int = 3
    n_classes: int = 100
    augment: bool = True


@dataclass
class ImagesDataConfig:
    """One directory per class under ``train/`` and ``validation/``."""

    kind: str = "images"
    path: str = MISSING
    image_size: int = 224
    channels: int = 3
    n_classes: int = MISSING
    augment: bool = True


@dataclass
class ShardsDataConfig:
    """Images in indexed tar shards, as ``python -m hpc_train prepare --images`` writes them."""

    kind: str = "shards"
    path: str = MISSING
    image_size: int = 224
    channels: int = 3
    n_classes: int = MISSING
    augment: bool = True


@dataclass
class SyntheticDataConfig:
    """Samples computed from their index."""

    kind: str = "synthetic"
    task: str = "tokens"  # tokens | images
    samples: int = 4096
    validation_samples: int = 256
    sequence_length: int = 256
    vocab_size: int = 256
    image_size: int = 32
    channels: int = 3
    n_classes: int = 10


@dataclass
class CustomDataConfig:
    """A user's dataset, built by ``_target_`` with ``args`` and ``split="train" | "validation"``."""

    kind: str = "custom"
    _target_: str = MISSING
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimConfig:
    """The optimizer and its learning rate over time."""

    name: str = "adamw"  # adamw | sgd
    lr: float = 1e-3
    lr_scaling: str = "none"  # none | linear | sqrt, against base_batch
    base_batch: int = 256
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # adamw
    eps: float = 1e-8  # adamw
    moments: str = "fp32"  # adamw: fp32 | bf16 | 8bit: how its two moments are kept; fp64 under precision fp64
    momentum: float = 0.9  # sgd
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping
    schedule: str = "cosine"  # constant | linear | cosine | wsd
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1  # the last learning rate as a share of the highest
    decay_share: float = 0.2  # wsd: the share of the steps in which the rate falls


@dataclass
class PrecisionConfig:
    """Number formats. Parameters and optimizer state stay in fp32 (fp64 under fp64)."""

    name: str = "fp32"  # fp64 | fp32 | bf16 | fp16
    loss_scale_init: float = 65536.0  # fp16
    loss_scale_growth_interval: int = 2000  # fp16: finite steps before the scale doubles


@dataclass
class TrainConfig:
    """What the training loop does."""

    seed: int = 0
    steps: int | None = None  # give steps or epochs
    epochs: float | None = None
    eval_every: int = 0  # steps; 0: only at the end
    activation_checkpointing: str = "none"  # none | full | selective | selective:N (every N-th layer) | ops
    loss_chunks: int = 1  # gpt: the sequence is cut into so many, and only one's logits exist at a time
    compile: bool = False  # torch.compile per layer
    nonfinite_limit: int = 50  # steps in a row without a finite gradient until the run goes back to a checkpoint
    spike_mads: float = 0.0  # so many MADs above the median the loss has jumped, and the run goes back; 0: it goes on
    max_rollbacks: int = 3  # each passes over the samples of the bad steps; then the run fails
    debug: bool = False  # 20 steps that look for the first number that is not finite, and for collectives that differ
    reproducible: str | None = None  # any_world_size: the same bits on any number of ranks; under single and dp
    threads: int | str = "auto"  # intra-op CPU threads per rank


@dataclass
class BatchConfig:
    """The global batch is the user's promise: it never depends on the world size."""

    global_size: int = 64  # samples per optimizer step
    micro_size: int | str = "auto"  # samples per micro-batch and rank
    micro_batches: int | str = "auto"  # micro-batches per step and rank: accumulation, or the pipeline's micro-batches
    logical_micro_batches: int | str = "auto"  # of a step under train.reproducible, and its most ranks; auto: 8
    drop_last: bool = True  # drop the short batch at the end of an epoch, or pad it
    loader_workers: int | str = "auto"  # loader processes per rank


@dataclass
class CheckpointConfig:
    """When state is saved. It is always saved on a stop request and at the end."""

    every: str = "auto"  # steps, a time (30m), auto; 0: only on a stop request and at the end
    keep: int = 2  # newest checkpoints kept
    keep_every: int = 0  # and the first one of each so many steps
    keep_best: str | None = None  # and the best by val_loss or val_accuracy
    verify: str = "full"  # full | sizes: what is compared with the manifest before a load
    visibility_timeout_s: float = 75.0  # on a network file system: how long a missing or short file is looked at again
    asynchronous: bool = False  # a copy in host memory is written while training goes on
    wait_for_room_s: float = 600.0  # the last save of a run is tried again for so long while the disk is full
    archive: str | None = None  # a directory elsewhere that gets a copy of the best and the last
    commit: str = "auto"  # auto | rename | marker: how a save takes effect; marker where renames are copies (buckets)


@dataclass
class ElasticConfig:
    """How a run deals with failures and stop requests."""

    collective_timeout_s: float = 600.0  # a collective that takes longer fails
    hang_timeout_s: str = "auto"  # seconds a step may take until the run restarts; auto: 5 x the slowest steps seen, at
    # least 3, on several nodes or GPUs at least 30 and twice the time that NCCL waits for a packet; 0: any time
    stop_grace_s: float | int | str = "auto"  # from a stop request until workers that still run are killed; also
    # how long before its time limit a job is asked to stop; auto: by the time of a save
    max_requeues: int = 10  # of one Slurm job, each with a new checkpoint since the one before; then it is given up
    spares: int = 0  # nodes on top of cluster.nodes, idle until one of the others is lost
    min_nodes: int | None = None  # fewer nodes go on when one is lost, down to these; null: the job is requeued
    heartbeat_timeout_s: float = 15.0  # a node that sends nothing for this long counts as lost
    join_timeout_s: float = 300.0  # from the start of the job until a node that has not joined is done without
    exclude_hours: float = 24.0  # for which the failures of a node count; one that failed twice is avoided


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: str = "auto"  # auto | online | offline | disabled; auto: online when a key is set and the service answers
    project: str = "hpc_train"
    entity: str | None = None
    log_checkpoint: bool = False  # the last checkpoint as an artifact


@dataclass
class ProfileConfig:
    """A profile of some steps, into profile/ of the run directory."""

    steps: str | None = None  # 10, or 10-12; null: none
    ranks: Any = 0  # a rank, [0,3] or all


@dataclass
class TelemetryConfig:
    """What is measured and where it goes."""

    log_every: int = 10  # steps
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = False
    profile: ProfileConfig = field(default_factory=ProfileConfig)


@dataclass
class LaunchConfig:
    """How jobs are submitted (with ``-m``)."""

    dry_run: bool = False  # print what would be submitted and write nothing
    detach: bool = False  # leave after submission
    array_parallelism: int | str = "auto"  # jobs of a sweep at the same time; auto: as many as there is room for
    chain: int = 1  # jobs on Slurm that follow each other as one run, where the site does not requeue
    confirm_gpu_hours: float = 50.0  # submissions to Slurm that may cost more are asked about
    yes: bool = False  # the answer, where nobody can be asked


@dataclass
class RunConfig:
    """The run directory."""

    root: str = "outputs"  # conf/ takes $HPC_TRAIN_ROOT or scratch space instead where they are known
    name: str | None = None  # makes the directory stable across calls, so that the run resumes
    fork: str | None = None  # the name of a new run, with other identity keys, from run.name's newest checkpoint
    group: str | None = None  # a Unix group that may read, resume and remove the run; null: as the umask says
    max_gpu_hours: float | None = None  # over all jobs of the run, which then saves, stops and is given up
    snapshot: bool = True  # copy the code of the current git work tree, so that edits do not reach jobs that wait


@dataclass
class Config:
    """The whole of a run. ``model`` and ``data`` hold one of the dataclasses above, told apart by ``kind``."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: Any = MISSING
    data: Any = MISSING
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunConfig = field(default_factory=RunConfig)


ModelConfig = GPTConfig | ViTConfig | CustomModelConfig
DataConfig = (
    TextDataConfig
    | TokensDataConfig
    | CIFAR100DataConfig
    | ImagesDataConfig
    | ShardsDataConfig
    | SyntheticDataConfig
    | CustomDataConfig
)

MODEL_SCHEMAS: dict[str, type] = {"gpt": GPTConfig, "vit": ViTConfig, "custom": CustomModelConfig}
DATA_SCHEMAS: dict[str, type] = {
    "text": TextDataConfig,
    "tokens": TokensDataConfig,
    "cifar100": CIFAR100DataConfig,
    "images": ImagesDataConfig,
    "shards": ShardsDataConfig,
    "synthetic": SyntheticDataConfig,
    "custom": CustomDataConfig,
}

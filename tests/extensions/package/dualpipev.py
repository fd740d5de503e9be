"""DualPipeV (DeepSeek-AI 2024, arXiv:2412.19437, section 3.2) as a schedule from outside."""

from hpc_train.layout.techniques import PipelineSchedule

SCHEDULE = PipelineSchedule(
    name="dualpipev",
    torch_class="torch.distributed.pipelining.schedules:ScheduleDualPipeV",
    stages_per_rank=(2, 2),
    placement="v",
    micro_batches="any",
    data_parallel=("allreduce", "zero1", "zero2"),
    data_parallel_reason="a split backward runs their hooks at the wrong time",
    in_flight=lambda shape, rank: (2 * shape.ranks - rank, 1 + rank),
    bubble=lambda shape: (shape.ranks - 1) / (6 * shape.micro_batches + shape.ranks - 1),
    splits_backward=True,
    compiles=False,
    ops_checkpointing=False,
    auto=None,
    order=None,
)

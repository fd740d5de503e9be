"""A data-parallel kind from outside: one plain all-reduce per parameter after the last backward."""

from hpc_train.layout.techniques import DataParallelKind

KIND = DataParallelKind(
    name="afterwards",
    replicas="tests.extensions.package.replicas:SummedAfterwards",
    sharder=None,
    shards=frozenset(),
    schedules=("1f1b", "tests.extensions.package.dualpipev:SCHEDULE"),
    tensor_parallel=False,
    compressed_as=None,
    updated_as=None,
    debugged_as=None,
    offloads=("optimizer",),
    reproducible=False,
    buckets=False,
    waits_in_backward=False,
)

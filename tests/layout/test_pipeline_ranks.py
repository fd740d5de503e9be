"""``strategy.pp=auto`` takes two stages on one node, and as many as the memory requires on several."""

from __future__ import annotations

import pytest

from hpc_train.config.schema import ClusterConfig
from hpc_train.launch.gpus import asked_gpu_memory
from hpc_train.layout.layout import Layout
from hpc_train.layout.memory import estimate, needed_bytes, reserved_bytes
from hpc_train.layout.resolve import resolve_layout
from hpc_train.schedulers.slurm.site import NodeKind, Partition, Site
from tests.config.composing import config_of

H100 = 80e9
LLAMA = ("model=llama_70b", "precision=bf16", "batch.global_size=512")


def hybrid(nodes: int, per_node: int, *overrides: str, memory: float | None = H100) -> Layout:
    return resolve_layout(config_of("+strategy=hybrid", *overrides), nodes, per_node, memory)


def test_a_small_model_has_two_stages_on_any_number_of_nodes() -> None:
    small = "model=gpt_124m"
    assert [(found.pp, found.dp) for found in (hybrid(nodes, 4, small) for nodes in (2, 3, 13, 16))] == [
        (2, 4), (2, 6), (2, 26), (2, 32)
    ]  # fmt: skip
    assert "fewest whose stages fit" in hybrid(16, 4, small).notes[0]


def test_a_large_model_has_the_fewest_stages_that_fit() -> None:
    large = (*LLAMA, "train.activation_checkpointing=full")
    found = hybrid(16, 8, *large)
    sizes = []
    for layout in (found, _with(16, *large)):
        memory = estimate(config_of("+strategy=hybrid", *large), layout)
        assert memory is not None
        sizes.append(needed_bytes(memory.total, reserved_bytes(layout)))
    assert (found.pp, found.dp) == (32, 4)
    assert sizes[0] <= H100 < sizes[1]
    assert "16 need 102 GiB" in found.notes[0]


def _with(pp: int, *overrides: str) -> Layout:
    return hybrid(16, 8, f"strategy.pp={pp}", *overrides)


def test_the_smallest_stages_are_used_if_none_fit() -> None:
    found = hybrid(2, 4, *LLAMA)
    assert found.pp == 8
    assert "the stages do not fit with any number of pipeline ranks" in found.notes[0]


def test_unknown_memory_means_two_stages_and_says_so() -> None:
    found = hybrid(4, 4, memory=None)
    assert found.pp == 2
    assert "the memory of a rank's device is unknown here" in found.notes[0]


def test_one_node_has_two_stages_whatever_the_memory() -> None:
    assert [hybrid(1, ranks, memory=1.0).pp for ranks in (1, 2, 3, 4, 8)] == [1, 2, 1, 2, 2]
    assert hybrid(1, 8, memory=1.0).notes == ()


@pytest.mark.parametrize(("nodes", "pp", "words"), [(3, 3, "fewest"), (5, 1, "4 layers are too few for 5")])
def test_ranks_that_two_does_not_divide(nodes: int, pp: int, words: str) -> None:
    found = hybrid(nodes, 1, "model=gpt_tiny")
    assert (found.pp, found.dp) == (pp, nodes // pp)
    assert words in found.notes[0]


def test_fewer_samples_than_replicas_need_more_stages() -> None:
    assert hybrid(2, 8, "batch.global_size=4", memory=None).pp == 4


@pytest.mark.parametrize(
    ("cluster", "types", "expected"),
    [
        (ClusterConfig(), ("h100",), H100),
        (ClusterConfig(), ("h100", "h200"), H100),
        (ClusterConfig(), ("h100", "unheard_of"), None),
        (ClusterConfig(gpu_type="h200"), ("h100", "h200"), 141e9),
        (ClusterConfig(gres="gpu:h100:4"), (), H100),
        (ClusterConfig(gres="gpu:4"), ("h100",), H100),
        (ClusterConfig(), (), None),
    ],
)
def test_the_site_names_the_gpus(cluster: ClusterConfig, types: tuple[str, ...], expected: float | None) -> None:
    kinds = tuple(NodeKind(1, 64, 1, {name: 4}) for name in types)
    site = Site("here", partitions={"gpu": Partition("gpu", default=True, kinds=kinds)})
    assert asked_gpu_memory(cluster, site) == expected

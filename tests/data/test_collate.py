"""``data.collate``: batches of a user's function, the names of their parts, and what is said about mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpc_train.config.schema import BatchConfig, CustomDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import IGNORED, SampleError
from hpc_train.data.feed import EvalFeed, LocalBatch, TrainFeed
from hpc_train.data.images import generator
from hpc_train.errors import UserError
from tests.data.layouts import replicas

CPU = torch.device("cpu")
HERE = "tests.data.collating"


def config(function: str | None, dataset: str = "Ragged", **args: Any) -> CustomDataConfig:
    collate = None if function is None else f"{HERE}.{function}"
    names = {"inputs": "tokens", "targets": "labels"}
    return CustomDataConfig(_target_=f"{HERE}.{dataset}", args=args, collate=collate, **names)


def feed(config: CustomDataConfig, dp: int = 1, rank: int = 0, start: int = 0, **more: Any) -> TrainFeed:
    layout = replicas(dp, 6, more.pop("micro_batches", 1))
    batch = BatchConfig(**{"global_size": 6, "loader_workers": 0} | more)
    return TrainFeed(build_dataset(config, "train", 3), batch, layout, rank, 5, CPU, start)


def columns(batches: list[LocalBatch], *names: str) -> list[tuple[Any, ...]]:
    """Returns for each sample of a global batch its target and its values in the context, without padding."""
    micros = [micro for batch in batches for micro in batch.micro_batches]
    rows = [zip(micro.targets.tolist(), *(micro.context[n].tolist() for n in names), strict=True) for micro in micros]
    return sorted(row for each in rows for row in each if row[0] != IGNORED)


@pytest.mark.parametrize("workers", [0, 1])
def test_ragged_items_become_nested_batches_of_any_width(workers: int) -> None:
    steps = feed(config("padded"), loader_workers=workers, micro_batches=3)
    widths = set()
    for _ in range(4):
        for micro in next(steps).micro_batches:
            assert set(micro.inputs) == {"ids", "longest"} and micro.targets.dtype == torch.int64
            width = micro.inputs["ids"].shape[1]
            assert micro.inputs["longest"].tolist() == [width] * 2
            assert micro.inputs["ids"][:, 0].tolist() == micro.targets.tolist()
            widths.add(width)
    assert len(widths) > 1
    steps.close()


@pytest.mark.parametrize(("workers", "plan"), [(0, [(2, 4), (3, 6)]), (1, [(2, 2), (3, 1)])])
def test_random_numbers_depend_on_the_samples_and_not_on_ranks_or_restarts(
    workers: int, plan: list[tuple[int, int]]
) -> None:
    one = feed(config("padded"))
    expected = [columns([next(one)], "noise") for _ in range(sum(steps for _, steps in plan))]
    found = []
    for dp, steps in plan:
        ranks = [feed(config("padded"), dp, rank, len(found), loader_workers=workers) for rank in range(dp)]
        found += [columns([next(rank) for rank in ranks], "noise") for _ in range(steps)]
        for rank in ranks:
            rank.close()
    assert found == expected
    noise = [row[1] for step in expected for row in step]
    assert len(set(noise)) == len(noise)  # also of the same sample in another epoch


def test_generators_for_each_item_are_independent_of_the_micro_batch() -> None:
    def drawn(micro_batches: int) -> list[Any]:
        micros = next(feed(config("negatives"), micro_batches=micro_batches)).micro_batches
        return [row for micro in micros for row in micro.inputs.tolist()]

    assert drawn(1) == drawn(3) and len(set(map(tuple, drawn(1)))) == 6
    before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first, again = (next(feed(config("negatives"))).micro_batches[0].context["chance"] for _ in range(2))
    assert torch.equal(first, again)  # the global generators depend on the samples of the micro-batch
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_random_numbers_are_independent_of_those_of_the_items() -> None:
    """The generators of an item of an image dataset, and the global ones of a dataset of the user."""
    micros = next(feed(config("drawing"), micro_batches=6)).micro_batches  # of one item each
    for micro in micros:
        (own, of_batch, of_item), index = micro.inputs[0].tolist(), int(micro.targets[0])
        augmentation = generator(3, 0, index).random()
        assert len({round(number, 6) for number in (own, of_batch, of_item, augmentation)}) == 4


def test_padding_has_no_targets_in_any_head() -> None:
    dataset = build_dataset(config("heads"), "validation", 3)
    batch = BatchConfig(global_size=8, loader_workers=0)
    ranks = [list(EvalFeed(dataset, batch, replicas(2, 8, 2), rank, CPU)) for rank in range(2)]
    last = [micro for rank in ranks for micro in rank[-1].micro_batches]  # 50 samples: the last batch has 2 of 8
    assert [micro.targets["kind"].tolist() for micro in last] == [[48, 49], [IGNORED] * 2, [IGNORED] * 2, [IGNORED] * 2]
    assert all((micro.targets["box"] == micro.targets["kind"][:, None]).all() for micro in last)
    assert [rank[-1].local_count for rank in ranks] == [2, 0]


def test_items_that_are_dicts_with_other_names() -> None:
    names = CustomDataConfig(_target_=f"{HERE}.Ragged", args={"keys": "pixels,label"}, inputs="pixels", targets="label")
    sample = build_dataset(names, "train", 0).sample(7, 0)
    assert sample.inputs.tolist() == [7] * 4 and sample.targets == 7 and list(sample.context) == ["noise"]


@pytest.mark.parametrize(
    ("function", "message", "fix"),
    [
        ("unseeded", "returned two different batches for the same items", "parameter `random`"),
        ("counting", "returned two different batches for the same items", "parameter `random`"),
        ("short", r"returned a Tensor of shape \[5\] and dtype torch.int32: but needs one row", "[6, ...]"),
        ("scalar", r"a float, 2.0 at \['scale'\]", "in dicts or not"),
        ("words", "a list of 2 elements: these are not numbers", "tensors or arrays"),
        ("text", "returned a str, 'a batch'", "return (inputs, targets)"),
        ("other_keys", "a dict with the keys 'x', 'y'", "data.inputs=x data.targets=y"),
    ],
)
def test_mistakes_of_a_function_name_it_and_the_samples(function: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        next(feed(config(function)))
    assert f"{HERE}.{function}, called with 6 items (sample " in error.value.what
    assert fix in error.value.fix


@pytest.mark.parametrize(
    ("how", "message", "fix"),
    [
        ("one", "is a tuple of 1 elements", "return (inputs, targets)"),
        ("names", "is a dict with the keys 'image', 'label'", "data.inputs=image data.targets=label"),
        ("words", "inputs is a str, 'a picture': these are not numbers", "return numbers"),
        ("ragged", "inputs is a list of 2 elements", "data.collate"),
        ("none", "is a NoneType, None", "return (inputs, targets)"),
        ("object", "inputs is a object", "return numbers"),
    ],
)
def test_mistakes_of_a_dataset_name_its_class_and_the_sample(how: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=r"sample \d \(tests.data.collating.Pairs\)") as error:
        next(feed(config(None, "Pairs", how=how)))
    assert message in error.value.what and fix in error.value.fix


@pytest.mark.parametrize(("function", "line"), [("failing", 'items[0]["color"]'), ("padded", "[1, 2][index + 2]")])
def test_an_exception_ends_with_the_line_of_the_user(function: str, line: str) -> None:
    with pytest.raises(SampleError) as error:
        next(feed(config(function, how="raises" if function == "padded" else "")))
    *_, code, last = (text for text in str(error.value).splitlines() if not set(text.strip()) <= {"^", "~"})
    assert line in code and last.startswith(("KeyError", "IndexError"))
    assert "hpc_train/" not in str(error.value).replace("hpc_train/tests", "")

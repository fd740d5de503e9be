from __future__ import annotations

import numpy as np
import pytest

from hpc_train.config.schema import CustomDataConfig, SyntheticDataConfig
from hpc_train.data.build import build_dataset
from hpc_train.errors import UserError

HERE = "tests.data.stand_ins"


@pytest.mark.parametrize("form", ["pair", "triple", "dict", "sample"])
def test_a_map_style_dataset(form: str) -> None:
    config = CustomDataConfig(_target_=f"{HERE}.MapStyle", args={"form": form})
    train, validation = (build_dataset(config, split, 0) for split in ("train", "validation"))
    sample = validation.sample(3, 0)
    assert len(train) == 5
    assert sample.inputs.tolist() == [103, 103] and sample.inputs.dtype == np.float32 and sample.targets == 3
    assert {name: value.tolist() for name, value in sample.context.items()} == (
        {"place": [3]} if form in ("triple", "dict") else {}
    )
    assert "MapStyle" in train.source(0)


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("nowhere.Nothing", {}, "nowhere.Nothing cannot be built"),
        (f"{HERE}.Nothing", {}, "Nothing"),
        (f"{HERE}.MapStyle", {"color": 1}, "color"),
        (f"{HERE}.no_random_access", {}, "which has no random access"),
    ],
)
def test_wrong_targets(target: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_dataset(CustomDataConfig(_target_=target, args=args), "train", 0)
    assert error.value.fix


def test_an_item_of_no_known_form() -> None:
    dataset = build_dataset(CustomDataConfig(_target_=f"{HERE}.MapStyle", args={"form": "text"}), "train", 0)
    with pytest.raises(UserError, match=r"sample 0 \(tests.data.stand_ins.MapStyle\) is a str, 'neither'") as error:
        dataset.sample(0, 0)
    assert "return (inputs, targets)" in error.value.fix


def test_a_dataset_of_ours_is_used_as_it_is() -> None:
    config = CustomDataConfig(_target_=f"{HERE}.numbers", args={"samples": 3})
    dataset = build_dataset(config, "train", 0)
    assert len(dataset) == 3 and dataset.source(2) == "/numbers/2.txt"


@pytest.mark.parametrize("task", ["tokens", "images"])
def test_synthetic_samples_are_a_function_of_the_index(task: str) -> None:
    config = SyntheticDataConfig(task=task, samples=20, validation_samples=7, sequence_length=32)
    one, again, validation = (build_dataset(config, split, 3) for split in ("train", "train", "validation"))
    assert (len(one), len(validation)) == (20, 7)
    for index in (19, 0, 19):
        assert np.array_equal(one.sample(index, 0).inputs, again.sample(index, 5).inputs)
        assert np.array_equal(one.sample(index, 0).targets, again.sample(index, 5).targets)
    assert not np.array_equal(one.sample(0, 0).inputs, validation.sample(0, 0).inputs)


def test_synthetic_shapes() -> None:
    tokens = build_dataset(SyntheticDataConfig(sequence_length=32, vocab_size=50), "train", 0).sample(1, 0)
    assert np.array_equal(tokens.inputs[1:], tokens.targets[:-1]) and tokens.inputs.max() < 50
    image = build_dataset(SyntheticDataConfig(task="images", n_classes=4), "train", 0).sample(6, 0)
    assert image.inputs.shape == (3, 32, 32) and image.targets == 2 and image.inputs.dtype == np.float32

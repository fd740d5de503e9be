"""The loss that the config of a transformers model asks for: that of transformers as a sum and a count, or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_train.config.schema import Config, CustomModelConfig, HFModelConfig, StrategyConfig, SyntheticDataConfig
from hpc_train.data.dataset import IGNORED, Batch, StepBatch
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.layout.validate import validate
from hpc_train.models.build import build_model
from hpc_train.models.hf.pretrained import hf_config
from hpc_train.parallel.build import build_engine
from tests.models.test_hf import AUTO, TEXT, loaded, saved
from tests.parallel.oracle import kept_mesh, whole
from tests.ranks import run_on_world
from tests.warm_parents import HUGGING_FACE

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
REGRESSION, SINGLE, MULTI = (f"{kind}" for kind in ("regression", "single_label_classification",
                                                    "multi_label_classification"))  # fmt: skip
CLASSES = torch.tensor([2, 0, 1, 2])
NUMBERS = torch.tensor([[0.5, 1.0, -2.0], [3.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, -1.0, 2.0]])
LABELS = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
WORDS = torch.tensor([[1, 2, 3, 4, 5, 6]] * 4) + torch.arange(4)[:, None]


def bert(**values: Any) -> Any:
    return transformers.BertConfig(**SMALL, vocab_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                                   **values)  # fmt: skip


def vit(**values: Any) -> Any:
    return transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, **values)


def mixtral(**values: Any) -> Any:
    values = {"num_local_experts": 4, "router_aux_loss_coef": 0.3, **values}
    return transformers.MixtralConfig(**TEXT, **values)


TEXTS, PICTURES = "sequence_classification", "image_classification"
CASES = {  # the functions import the modules of transformers
    "regression of one integer": (partial(bert, num_labels=1, problem_type=REGRESSION), TEXTS, CLASSES),
    "one output without a problem type": (partial(bert, num_labels=1), TEXTS, CLASSES[:, None]),
    "regression of several numbers": (partial(bert, num_labels=3, problem_type=REGRESSION), TEXTS, NUMBERS),
    "integers of several labels": (partial(bert, num_labels=3, problem_type=MULTI), TEXTS, LABELS),
    "several labels by their dtype": (partial(bert, num_labels=3), TEXTS, LABELS.float()),
    "classes by their dtype": (partial(bert, num_labels=3), TEXTS, CLASSES[:, None]),
    "classes of which one is ignored": (partial(bert, num_labels=3), TEXTS, torch.tensor([2, IGNORED, 1, 0])),
    "regression of pictures": (partial(vit, num_labels=1, problem_type=REGRESSION), PICTURES, NUMBERS[:, 0]),
    "several labels of pictures": (partial(vit, num_labels=3), PICTURES, LABELS.float()),
    "masked words": (bert, "masked_lm", torch.where(WORDS % 3 == 0, WORDS, IGNORED)),
    "experts": (partial(mixtral, output_router_logits=True), "causal_lm", WORDS + 1),
    "experts without that loss": (mixtral, "causal_lm", WORDS + 1),
}


def inputs_of(task: str) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator) if task == PICTURES else WORDS


def dtype_of(task: str) -> torch.dtype:
    """torch's grouped products of experts do not take fp64."""
    return torch.float32 if task == "causal_lm" else torch.float64


def their_loss(model: Any, inputs: Tensor, targets: Tensor, task: str) -> Tensor:
    """The loss of transformers for targets that are shifted already, as floats where it needs them for gradients."""
    if task == "causal_lm":
        loss: Tensor = model(inputs, labels=targets, shift_labels=targets).loss
        return loss
    numbers = model.config.num_labels == 1 or model.config.problem_type in (REGRESSION, MULTI)
    labels = targets.double() if task != "masked_lm" and (numbers or targets.is_floating_point()) else targets
    loss = model(inputs, labels=labels).loss
    return loss


@pytest.mark.parametrize("case", CASES)
def test_the_mean_and_its_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    config, task, targets = CASES[case]
    theirs = saved(config(), task, tmp_path).to(dtype_of(task)).train()
    ours = loaded(tmp_path, task, dtype_of(task)).train()
    inputs = inputs_of(task)
    total, count = ours(inputs, {}, targets)
    expected = their_loss(theirs, inputs, targets, task)
    (total / count).backward()
    expected.backward()
    assert total.item() / count.item() == pytest.approx(expected.item(), rel=1e-6)
    assert count.item() == (targets != IGNORED).sum().item(), "the host knows the count from the targets"
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)
    correct = ours.eval()(inputs, {}, targets)[2]
    assert (correct is None) == (case.startswith(("regression", "one output", "integers", "several")))


def test_labels_are_smoothed_as_torch_does(tmp_path: Path) -> None:
    saved(bert(num_labels=3), TEXTS, tmp_path)
    ours = loaded(tmp_path, TEXTS, config={"label_smoothing": 0.2})
    targets = torch.tensor([2, IGNORED, 1, 0])
    total, count, _ = ours(WORDS, {}, targets)
    expected = torch.nn.functional.cross_entropy(ours(WORDS, {}), targets, label_smoothing=0.2)
    torch.testing.assert_close(total / count, expected)


def gradients(rank: int, world_size: int, cases: list[tuple[Path, str, Tensor]], kind: str) -> list[Any]:
    """The loss of a step whose four samples are divided among the ranks, and the gradients."""
    found = []
    for folder, task, targets in cases:
        model = HFModelConfig(name_or_path=str(folder), task=task, split_dependent_loss=True)
        config = Config(model=model, strategy=StrategyConfig(data_parallel=kind))
        config.precision.name = "fp32" if task == "causal_lm" else "fp64"
        layout = Layout(world_size, 1, 1, world_size if kind == "zero3" else 1, kind, "1f1b", 1, 1, 4 // world_size)
        mesh = kept_mesh(layout, rank)
        engine = build_engine(config, mesh)
        rows = slice(rank * 4 // world_size, (rank + 1) * 4 // world_size)
        batch = Batch(inputs_of(task)[rows], targets[rows])
        result = engine.train_step(0, StepBatch((batch,), int((targets != IGNORED).sum())))
        loss = engine.reduce(result).loss
        found.append((loss, {name: whole(value.grad).numpy() for name, value in engine.named_parameters().items()}))
    return found


@pytest.mark.long_form(8)
@pytest.mark.parametrize("kind", ["ddp", "zero3"])
@pytest.mark.filterwarnings("ignore:the load-balancing loss")
def test_ranks_add_up_the_loss_of_a_config(kind: str, tmp_path: Path) -> None:
    """A load-balancing loss is no such sum: each rank has its own, as in DistributedDataParallel."""
    names = ["regression of several numbers", "several labels by their dtype", "masked words", "experts"]
    cases, expected = [], []
    for place, name in enumerate(names):
        config, task, targets = CASES[name]
        theirs = saved(config(), task, tmp_path / str(place)).to(dtype_of(task)).train()
        cases.append((tmp_path / str(place), task, targets))
        parts = [slice(0, 2), slice(2, 4)] if name == "experts" else [slice(0, 4)]
        losses = [their_loss(theirs, inputs_of(task)[part], targets[part], task) for part in parts]
        loss = torch.stack(losses).mean()
        loss.backward()
        expected.append((loss.item(), {name: value.grad for name, value in theirs.named_parameters()}))
    for ours in run_on_world(2, gradients, cases, kind, imports=HUGGING_FACE):
        for name, (loss, found), (wanted, theirs_) in zip(names, ours, expected, strict=True):
            assert loss == pytest.approx(wanted, rel=1e-6), name
            for parameter, gradient in theirs_.items():
                torch.testing.assert_close(torch.from_numpy(found[parameter]), gradient, rtol=1e-5, atol=1e-7)


def job(folder: Path, task: str, ranks: int = 1, **keys: Any) -> Config:
    model = HFModelConfig(name_or_path=str(folder), task=task, pretrained=False, **keys)
    config = Config(model=model, data=SyntheticDataConfig(vocab_size=32), strategy=StrategyConfig(dp=ranks))
    config.train.steps = 1
    return config


def test_a_loss_that_is_not_computed_is_refused_by_the_name_of_its_key(tmp_path: Path) -> None:
    """At submission, and by a worker, which also knows the defaults of transformers."""
    refused: list[tuple[dict[str, Any], str, str]] = [
        ({"model_type": "bamba", "z_loss_coefficient": 0.1}, "causal_lm", "z_loss_coefficient=0.1"),
        ({"model_type": "prophetnet"}, "causal_lm", "disable_ngram_loss=False"),
        ({"model_type": "prophetnet", "disable_ngram_loss": True, "eps": 0.1}, "causal_lm", "eps=0.1"),
        ({"model_type": "llama", "label_smoothing": 0.1, **TEXT}, "causal_lm", "label_smoothing=0.1"),
        ({"model_type": "bert", "problem_type": "ranking"}, TEXTS, "problem_type='ranking'"),
    ]
    for values, task, message in refused:
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=message):
            validate(job(tmp_path, task), 1, 1)
    bert(num_labels=3).save_pretrained(tmp_path)
    model = loaded(tmp_path, TEXTS, pretrained=False)
    with pytest.raises(UserError, match=r"of shape \[4, 3\] needs integers of shape \[4\]"):
        model(WORDS, {}, LABELS)
    with pytest.raises(UserError, match="has the key num_lables, which a BertConfig does not have"):
        hf_config(HFModelConfig(name_or_path=str(tmp_path), task=TEXTS, config={"num_lables": 2}))


def test_a_load_balancing_loss_is_refused_where_several_compute_it(tmp_path: Path) -> None:
    mixtral(output_router_logits=True).save_pretrained(tmp_path)
    assert validate(job(tmp_path, "causal_lm"), 1, 1).micro_batches == 1
    for ranks, batch, several in ((2, {}, "2 ranks"), (1, {"micro_batches": 2}, "2 micro-batches")):
        config = job(tmp_path, "causal_lm", ranks)
        config.batch = replace(config.batch, **batch)
        with pytest.raises(UserError, match=f"output_router_logits=true.* and {several} compute"):
            validate(config, 1, ranks)
        config.model = replace(config.model, split_dependent_loss=True)
        validate(config, 1, ranks)
        config.model = replace(config.model, split_dependent_loss=False, config={"router_aux_loss_coef": 0.0})
        validate(config, 1, ranks)


def a_classifier(**values: Any) -> nn.Module:
    module: nn.Module = transformers.AutoModelForSequenceClassification.from_config(bert(**values))
    return module


def test_a_custom_model_of_transformers_does_not_lose_the_loss_of_its_config() -> None:
    def build(loss: str, **values: Any) -> Any:
        return build_model(CustomModelConfig(_target_=f"{__name__}.a_classifier", args=values, loss=loss), 0)

    with pytest.raises(UserError, match=r"problem_type=multi_label_classification, but model.loss=cross_entropy"):
        build("cross_entropy", num_labels=3, problem_type=MULTI)
    with pytest.raises(UserError, match=r"label_smoothing=0\.1"):
        build("cross_entropy", num_labels=3, label_smoothing=0.1)
    build("mse", num_labels=3, problem_type=REGRESSION)
    build("cross_entropy", num_labels=3)


def test_experts_that_are_stored_one_by_one_are_read_in_pieces(tmp_path: Path) -> None:
    """The form of save_pretrained and of the hub; other models store several matrices as one."""
    swiglu = transformers.Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, image_size=8,
                                       patch_size=4, use_swiglu_ffn=True, num_labels=3)  # fmt: skip
    experts = transformers.Qwen3MoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    for place, (config, task) in enumerate([(mixtral(), "causal_lm"), (experts, "causal_lm"), (swiglu, PICTURES)]):
        folder = tmp_path / str(place)
        theirs = saved(config, task, folder).to(dtype_of(task))
        ours = loaded(folder, task, dtype_of(task))
        inputs = inputs_of(task)
        assert torch.equal(ours(inputs, {}), theirs(inputs).logits)
        for name, parameter in theirs.named_parameters():
            begin = tuple(min(1, size - 1) for size in parameter.shape)
            size = tuple(max(1, size // 2) for size in parameter.shape)
            box = tuple(slice(first, first + count) for first, count in zip(begin, size, strict=True))
            assert torch.equal(ours.stored_box(name, begin, size), parameter[box].float()), name
            assert ours.stored_box(name, begin, (0, *size[1:])).shape == (0, *size[1:])
        assert AUTO[task]

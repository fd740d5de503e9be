"""``generate`` continues prompts exactly as a loop over the weights of the checkpoint does, under any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.checkpoint.restoring import load_weights, open_weights
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.commands import model
from hpc_train.config.compose import typed
from hpc_train.config.schema import SFTDataConfig, TokensDataConfig
from hpc_train.errors import UserError
from hpc_train.models.build import build_model
from hpc_train.models.model import Model
from hpc_train.parallel.build import build_engine
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.tasks.generate import check_prompts, generation_config, is_override
from hpc_train.train.decoding import Decoder, choose
from hpc_train.train.prompts import FileCodec, Sampling, TokenizerChoice, choose_tokenizer
from tests.checkpoint.tensors import read_tensors
from tests.checkpoint.training import join_again
from tests.config.composing import compose
from tests.doors.command import hpc_train
from tests.ranks import run_on_world
from tests.train.runs import TINY, frozen, run_attempt

ASKED = ["precision=fp64", "model.n_layers=2", "train.steps=2", "optim.lr=0.1", "data.sequence_length=24", "+hooks=ema"]
ROWS = ((1, 2, 3), (7,), (30, 4, 9, 2, 11), (3, 2, 1))  # unequal lengths, two of them equal
NEW, DRAWN = 5, Sampling(temperature=1.3, top_k=20, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint, which also holds the average of the weights."""
    run = frozen(tmp_path_factory.mktemp("trained") / "base", *ASKED)
    assert run_attempt(run, 1) == [0]
    return run.path


def checkpoint_of(base: Path) -> Checkpoint:
    return Checkpoint(2, base / "checkpoints" / "step-00000002")


def bare_model(base: Path, prefix: str = "model.") -> Model:
    """The model with the weights of the checkpoint, or with those that a hook keeps."""
    stored = read_tensors(checkpoint_of(base).path)
    model = build_model(typed(compose([*TINY, *ASKED])).model, 0)
    model.to_empty(device="cpu").double()
    model.init_buffers(torch.device("cpu"))
    names = {name: stored[f"{prefix}{name}"] for name, _ in model.named_parameters()}
    model.load_state_dict(names, strict=False)
    assert isinstance(model, Model)
    return model.eval()


def bare_loop(model: Model, prompt: Sequence[int], new: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            logits = model(torch.tensor([tokens]), {})
            assert isinstance(logits, Tensor)
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_the_command_continues_as_a_bare_loop_does(base: Path) -> None:
    prompts = [" ".join(map(str, row)) for row in ROWS]
    asked = ["--tokenizer", "ids", "--max-tokens", str(NEW), "--json"]
    workers = ["+strategy=zero3", "cluster.cpu_workers=2", "cluster=local"]
    done = hpc_train("generate", str(base), *prompts, *asked, *workers, cwd=base.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    model = bare_model(base)
    assert [each["tokens"] for each in found["completions"]] == [bare_loop(model, row, NEW) for row in ROWS]
    assert [each["prompt"] for each in found["completions"]] == prompts
    assert found["completions"][1]["completion"].split() == [str(token) for token in bare_loop(model, ROWS[1], NEW)]
    assert found["step"] == 2 and "zero3" in found["layout"]


@pytest.mark.long_form(12)  # the command generates as a bare loop above
def test_every_layout_and_the_average_give_the_tokens_of_one_process(base: Path) -> None:
    sharded, split = (
        run_on_world(2, generated, str(base), strategy)
        for strategy in (["+strategy=zero3"], ["+strategy=tp", "strategy.tp=2"])
    )
    greedy, drawn, average = sharded[0]
    assert greedy == [bare_loop(bare_model(base), row, NEW) for row in ROWS]
    assert average == [bare_loop(bare_model(base, "hooks.ema."), row, NEW) for row in ROWS]
    assert greedy not in (drawn, average)
    for result in [*sharded, *split]:
        assert result == [greedy, drawn, average]


def generated(rank: int, world_size: int, base: str, strategy: list[str]) -> list[Any]:
    config = generation_config(load(RunDirectory(Path(base))), strategy)
    mesh = join_again(config, rank, world_size)
    engine = build_engine(config, mesh)
    alone, together = Decoder(engine, mesh), Decoder(engine, mesh, width=24)
    load_weights(open_weights(checkpoint_of(Path(base)), mesh), engine, mesh)
    greedy, drawn = together.run(ROWS, NEW), alone.run(ROWS, NEW, DRAWN)
    if config.strategy.tp == 1:
        assert greedy is not None and alone.run(ROWS, NEW) == greedy, "padding at the end changes nothing"
        assert together.run(ROWS, NEW, DRAWN) == drawn, "the same seed draws the same tokens"
        again = alone.run([ROWS[0], ROWS[0]], NEW, DRAWN)
        assert again is not None and again[0] != again[1], "each prompt has a separate stream"
        first = greedy[0]
        assert alone.run(ROWS[:1], NEW, ends=[first[2]]) == [first[: first.index(first[2]) + 1]]
        assert alone.run(ROWS, NEW, proceed=lambda done: done < 2) is None
    load_weights(open_weights(checkpoint_of(Path(base)), mesh), engine, mesh, "ema")
    return [greedy, drawn, together.run(ROWS, NEW)]


def test_draws_follow_the_distribution_that_is_left() -> None:
    logits, stream = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(0)
    drawn = torch.tensor([choose(logits, Sampling(1.0, top_k=3), stream) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / len(drawn)
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95, atol=0.04)
    drawn = torch.tensor([choose(logits, Sampling(1.0, top_p=0.7), stream) for _ in range(1000)])
    assert set(drawn.tolist()) == {0, 1}, "0.5 alone is less than 0.7"
    assert {choose(logits, Sampling(0.01), stream) for _ in range(50)} == {0}


REFUSED = {
    "no prompt": ([], "there is no prompt"),
    "too long": (
        ["1 2 3", "--max-tokens", "22"],
        "3 tokens, to which up to 22 are added, but the model was trained on 24",
    ),
    "text as ids": (["def"], "'def' is not a list of token ids"),
    "no effect": (["1", "--top-k", "4"], "no effect at temperature 0"),
    "a temperature": (["1", "--temperature", "-1"], "--temperature is -1.0"),
    "a pipeline": (["1", "+strategy=pp"], "a pipeline splits it"),
    "another model": (["1", "model.dim=8"], "changes the model"),
    "a checkpoint": (["1", "--checkpoint", "7"], "no checkpoint of step 7"),
    "an option": (["1", "--max-token", "7"], "unknown option --max-token"),
    "a file": (["--prompts", "none.txt"], "none.txt cannot be read"),
    "a tokenizer": (["1", "--tokenizer", "none.json"], "none.json is not a file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_generated_is_refused_before_workers_start(base: Path, case: str) -> None:
    arguments, what = REFUSED[case]
    with pytest.raises(UserError, match=what):
        model.generate([str(base), "--tokenizer", "ids", *arguments, "cluster=local"])


def test_prompts_that_do_not_fit_the_model_are_refused(base: Path) -> None:
    config = load(RunDirectory(base))
    for prompts, what in (([[]], "prompt 1 has no tokens"), ([[1, 99]], "token id 99, but the model has 32 token ids")):
        with pytest.raises(UserError, match=what):
            check_prompts(config, prompts, 1)


def test_a_run_that_is_unknown_or_has_no_text_is_refused(base: Path) -> None:
    with pytest.raises(UserError, match="no run"):
        model.generate([str(base.parent / "other"), "a"])
    with pytest.raises(UserError, match="neither data=synthetic nor the model has a tokenizer"):
        model.generate([str(base), "a", "cluster=local"])
    images = typed(compose(["model=vit_tiny", "data=synthetic", "data.task=images"]))
    with pytest.raises(UserError, match="the run trains model=vit with data=synthetic"):
        generation_config(images, ["cluster=local"])


def test_prompts_come_from_words_and_files(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo = 2\n")
    (tmp_path / "lines.jsonl").write_text('"a\\nb"\n3\n')
    assert model._prompts(["zero"], tmp_path / "lines.txt") == ["zero", "one", "two = 2"]
    with pytest.raises(UserError, match="has 3, which is not a string"):
        model._prompts([], tmp_path / "lines.jsonl")


def test_the_tokenizer_is_that_of_the_data(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[EOS]": 0, "a": 1, "b": 2, "?": 3}, unk_token="?")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {"settings": {"tokenizer": str(tmp_path / "tokenizer.json")}}
    meta = {"dtype": "uint16", "vocab_size": 4, "counts": {"train": 9}, "separator": 0, "source": settings}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    text = typed(compose([]))
    assert choose_tokenizer(text, None) == TokenizerChoice("bytes")
    assert choose_tokenizer(text, None).open().encode("é") == [0xC3, 0xA9]
    tokens = replace(text, data=TokensDataConfig(path=str(tmp_path), vocab_size=4))
    chosen = choose_tokenizer(tokens, None)
    assert chosen == TokenizerChoice(str(tmp_path / "tokenizer.json"), ends=(0,))
    codec = chosen.open()
    assert isinstance(codec, FileCodec) and codec.encode("b a") == [2, 1]
    assert model._completion(codec, [2, 1], [2, 2, 0], chosen.ends) == " b b"
    assert choose_tokenizer(tokens, str(tmp_path)).name == chosen.name
    chats = replace(text, data=SFTDataConfig(path=str(tmp_path), tokenizer=str(tmp_path), vocab_size=4))
    assert choose_tokenizer(chats, None) == TokenizerChoice(chosen.name, special=True)


def test_a_published_model_has_positions_and_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    values = {"model_type": "llama", "max_position_embeddings": 10, "vocab_size": 300, "eos_token_id": [2, 5]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer.json").write_text("{}")
    hf = ["model=hf", f"model.name_or_path={tmp_path}", "model.task=causal_lm", "data=synthetic"]
    config = typed(compose(hf))
    assert choose_tokenizer(config, None) == TokenizerChoice(str(tmp_path / "tokenizer.json"), True, (2, 5))
    check_prompts(config, [[299] * 6], 4)
    with pytest.raises(UserError, match="but the model has 10 positions"):
        check_prompts(config, [[299] * 7], 4)
    with pytest.raises(UserError, match=r"trains model\.task=masked_lm"):
        generation_config(typed(compose([*hf, "model.task=masked_lm"])), ["cluster=local"])


@pytest.mark.parametrize(
    "word", ["cluster=local", "~data.path", "+experiment=own", "cluster/fabric=own", "+data@data.x=a"]
)
def test_overrides_are_no_prompts(word: str) -> None:
    assert is_override(word)


@pytest.mark.parametrize("word", ["x = 1", "def main(", "~", "~ data", "run", "data. Then"])
def test_other_words_are_prompts(word: str) -> None:
    assert not is_override(word)

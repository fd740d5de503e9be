"""data=sft: tokens and targets are those of transformers, each record is read once, and packing changes no loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import pytest

from hpc_train.config.schema import (
    BatchConfig,
    Config,
    GPTConfig,
    MixtureDataConfig,
    PrecisionConfig,
    SFTDataConfig,
    StrategyConfig,
    TrainConfig,
)
from hpc_train.data import sft as records
from hpc_train.data import sft_inputs
from hpc_train.data.build import build_dataset
from hpc_train.data.dataset import IGNORED, Dataset
from hpc_train.data.feed import TrainFeed
from hpc_train.data.sources import SFT
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.parallel.build import build_engine
from tests.checkpoint.training import join_again
from tests.config.composing import config_of
from tests.data.chats import CHATML, LAST_ONLY, TAGGED, chats, write_jsonl, write_tokenizer
from tests.data.descent import descent, tensors_of, weights_of
from tests.parallel.oracle import error
from tests.ranks import run_on_world

pytest.importorskip("transformers")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return write_tokenizer(tmp_path / "tokenizer")


def sft(folder: Path, **others: Any) -> SFTDataConfig:
    """A config for ``chats.jsonl``, with all records but one for training."""
    known = {
        "path": str(folder / "chats.jsonl"),
        "tokenizer": str(folder / "tokenizer"),
        "cache": str(folder / "cache"),
    }
    return SFTDataConfig(**{**known, "vocab_size": 300, "validation_share": 1e-9, "sequence_length": 512, **others})


def pairs(*datasets: Dataset) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of all samples, sorted."""
    samples = [dataset.sample(index, 0) for dataset in datasets for index in range(len(dataset))]
    return sorted((sample.inputs.tolist(), sample.targets.tolist()) for sample in samples)


def both(config: SFTDataConfig) -> list[Dataset]:
    return [build_dataset(config, split, 0) for split in ("train", "validation")]


def expected(tokenizer: Any, conversations: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """What transformers says about the answers, by the generation tags of ``TAGGED``."""
    found = []
    for each in conversations:
        told = tokenizer.apply_chat_template(
            each["messages"], chat_template=TAGGED, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learnt = told["input_ids"], told["assistant_masks"]
        assert 0 < sum(learnt) < len(ids)
        found.append((ids[:-1], [i if m else IGNORED for i, m in zip(ids[1:], learnt[1:], strict=True)]))
    return sorted(found)


@pytest.mark.parametrize("template", [CHATML, TAGGED], ids=["prefixes", "generation tags"])
def test_the_answers_are_those_of_transformers(template: str, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "own.jinja").write_text(template)
    made = chats(30)
    made += [{"messages": each["messages"][2:]} for each in chats(5)]  # begin with the assistant
    write_jsonl(tmp_path / "chats.jsonl", made)
    config = sft(tmp_path, chat_template=str(tmp_path / "own.jinja"))
    found = pairs(*both(config))
    assert found == expected(tokenizer, made)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    answers = [sum(m["role"] == "assistant" for m in each["messages"]) for each in made]
    assert sum(targets.count(end) for _, targets in found) == sum(answers), "a model learns to end its turn"


def test_the_first_answer_of_a_template_without_marker_begins_with_its_content(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "own.jinja").write_text("<|im_start|>{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    answers = ("fox", "lazy dog", "Übermut", "times while", "quick")
    made = [
        {"messages": [{"role": "assistant", "content": f" {answer} "}, {"role": "user", "content": "jumps"}]}
        for answer in answers
    ]
    write_jsonl(tmp_path / "chats.jsonl", made)
    found = pairs(*both(sft(tmp_path, chat_template=str(tmp_path / "own.jinja"))))
    learnt = [tokenizer.decode([target for target in targets if target != IGNORED]) for _, targets in found]
    assert sorted(text.strip() for text in learnt) == sorted(f"{answer} ]" for answer in answers)


def test_completions_and_texts(tmp_path: Path, tokenizer: Any) -> None:
    made = [
        {"prompt": "the lazy dog", "completion": " jumps"},
        {"text": "over a fox"},
        {"prompt": "Übermut ", "completion": "Übermut\n42"},
    ]
    write_jsonl(tmp_path / "chats.jsonl", made)
    end = tokenizer.eos_token_id
    expected = []
    for prompt, rest in (("the lazy dog", " jumps"), ("", "over a fox"), ("Übermut ", "Übermut\n42")):
        before, ids = tokenizer(prompt)["input_ids"], [*tokenizer(prompt + rest)["input_ids"], end]
        assert ids[: len(before)] == before
        count = max(1, len(before))
        expected.append((ids[:-1], [IGNORED] * (count - 1) + ids[count:]))
    assert pairs(*both(sft(tmp_path))) == sorted(expected)


@pytest.mark.parametrize("only_tokenizer_json", [False, True])
def test_truncation_and_padding_of_the_tokenizer_are_ignored(
    tmp_path: Path, tokenizer: Any, only_tokenizer_json: bool
) -> None:
    made, settings = chats(10), dict[str, Any]()
    if only_tokenizer_json:
        (tmp_path / "tokenizer" / "tokenizer_config.json").unlink()
        (tmp_path / "chat.jinja").write_text(CHATML)
        settings = {"chat_template": str(tmp_path / "chat.jinja")}
    else:
        made += [{"prompt": "the lazy dog", "completion": " jumps"}, {"text": "over a fox " * 20}]
    write_jsonl(tmp_path / "chats.jsonl", made)
    before = pairs(*both(sft(tmp_path, **settings)))
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    assert pairs(*both(sft(tmp_path, cache=str(tmp_path / "other"), **settings))) == before


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """A bare tokenizer.json names none; of a directory transformers knows more than its files."""
    bare = tmp_path / "bare/tokenizer.json"
    bare.parent.mkdir()
    bare.write_bytes((tmp_path / "tokenizer/tokenizer.json").read_bytes())
    (tmp_path / "tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer/special_tokens_map.json").unlink(missing_ok=True)
    for record in ({"prompt": "the dog", "completion": " jumps"}, {"text": "a fox"}):
        write_jsonl(tmp_path / "chats.jsonl", [record] * 3)
        for known in (bare, tmp_path / "tokenizer"):
            with pytest.raises(
                UserError, match=r"names no token that ends a text.*eos_token(.|\n)*tokenizer_config.json"
            ):
                build_dataset(sft(tmp_path, tokenizer=str(known)), "train", 0)
        with pytest.raises(UserError, match=r"bare/tokenizer.json names no token"):
            SFT.check_inputs(sft(tmp_path, tokenizer=str(bare)))  # type: ignore[misc]  # before the submission
    write_jsonl(tmp_path / "chats.jsonl", chats(3))
    (tmp_path / "chat.jinja").write_text(CHATML)
    SFT.check_inputs(sft(tmp_path, tokenizer=str(bare), chat_template=str(tmp_path / "chat.jinja")))  # type: ignore[misc]


def test_each_record_is_read_once_from_any_input(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = chats(30)
    write_jsonl(tmp_path / "chats.jsonl", made)
    truth = expected(tokenizer, made)
    monkeypatch.setattr(sft_inputs, "PART_BYTES", 700)  # shorter than some lines
    monkeypatch.setattr(sft_inputs, "PART_ROWS", 7)
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files/b.jsonl", made[:11])
    (tmp_path / "files/a.jsonl").write_text("\n" + "\n\n".join(map(json.dumps, made[11:])))  # no newline at the end
    paths = [tmp_path / "chats.jsonl", tmp_path / "files"]
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(made).save_to_disk(str(tmp_path / "table"))
    paths.append(tmp_path / "table")
    for path in paths:
        assert pairs(*both(sft(tmp_path, path=str(path)))) == truth
    assert not list((tmp_path / "cache").glob("*.*")), "locks or unfinished parts are left"
    assert len(list((tmp_path / "cache").iterdir())) > 30
    monkeypatch.setattr(records, "_write", None)  # everything is there
    assert pairs(*both(sft(tmp_path))) == truth


@pytest.mark.parametrize("name", ["b.jsonl.gz", "b.ndjson.zst"])
def test_compressed_records_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "found"}])
    (tmp_path / name).write_bytes(b"compressed")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=f"{name} is not text") as error:
            sft_inputs.find_files(str(path), "data.path")
        assert "decompress" in error.value.fix


def test_processes_share_the_work(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for two processes: their locks exclude each other in the same way."""
    write_jsonl(tmp_path / "chats.jsonl", chats(30))
    write, written, two = records._write, [], Barrier(2)

    def slowly(stored: records.Stored, encoder: Any) -> None:
        if get_ident() not in {own for _, own in written}:
            written.append((stored, get_ident()))
            two.wait(30)  # the other one takes another part meanwhile
        else:
            written.append((stored, get_ident()))
        write(stored, encoder)

    monkeypatch.setattr(sft_inputs, "PART_BYTES", 2000)
    monkeypatch.setattr(records, "_write", slowly)
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: build_dataset(sft(tmp_path), "train", 0), range(2)))
    assert [len(each) for each in built] == [29, 29]
    stored = [each.directory for each, _ in written]
    assert len(stored) == len(set(stored)) == len(list((tmp_path / "cache").iterdir())), "a part was computed twice"


def test_long_records_are_cut_and_those_without_answers_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    made = chats(30)
    write_jsonl(tmp_path / "chats.jsonl", [*made, {"messages": [{"role": "user", "content": "alone"}]}])
    whole, longest = expected(tokenizer, made), 40
    kept = [(inputs[:longest], targets[:longest]) for inputs, targets in whole]
    kept = sorted(pair for pair in kept if any(target != IGNORED for target in pair[1]))
    assert len(kept) < len(whole) and max(len(inputs) for inputs, _ in whole) > longest
    found = both(sft(tmp_path, sequence_length=longest, validation_share=0.3))
    assert pairs(*found) == kept and min(map(len, found)) > 1
    dropped = [int(each.notice.split()[0]) for each in found]
    assert sum(dropped) == 31 - len(kept) and "have no answer within 40 tokens" in found[0].notice
    own = sft(tmp_path, validation_path=str(write_jsonl(tmp_path / "other.jsonl", made[:3])))
    assert [len(each) for each in both(own)] == [30, 3]
    with pytest.raises(UserError, match="none of the"):
        build_dataset(replace(own, sequence_length=2), "train", 0)
    with pytest.raises(UserError, match=r"data.vocab_size is 20"):
        build_dataset(replace(own, vocab_size=20), "train", 0)


def test_packed_records_are_whole(tmp_path: Path, tokenizer: Any) -> None:
    write_jsonl(tmp_path / "chats.jsonl", chats(30))
    alone, packed = (build_dataset(sft(tmp_path, packing=each), "train", 0) for each in (False, True))
    assert len(packed) < len(alone) / 3
    found = []
    for index in range(len(packed)):
        sample = packed.sample(index, 0)
        ids = sample.context["document_ids"]
        found += [
            (sample.inputs[own].tolist(), sample.targets[own].tolist())
            for own in (ids == number for number in range(ids.max() + 1))
        ]
        assert (sample.targets[ids == -1] == IGNORED).all()
    assert sorted(found) == pairs(alone)


def train_part(rank: int, world_size: int, data: Any, steps: int, size: int) -> tuple[list[float], Any]:
    """Returns the losses and the weights of plain gradient descent."""
    config = Config(
        strategy=StrategyConfig(dp=world_size),
        model=GPTConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=24),
        data=data,
        precision=PrecisionConfig(name="fp64"),
        batch=BatchConfig(global_size=size, micro_batches=2, loader_workers=0, drop_last=False),
        train=TrainConfig(seed=3, steps=20),
    )
    mesh = join_again(config, rank, world_size)
    engine = build_engine(config, mesh)
    feed = TrainFeed(build_dataset(data, "train", 3), config.batch, mesh.layout, mesh.dp_rank, 5, mesh.device, 0)
    losses = [loss for _, loss in descent(engine, feed, mesh, range(steps), rate=0.1)]
    return losses, weights_of(engine)


@pytest.mark.long_form(10)  # tests/parallel/test_packing.py has packed documents
def test_packing_and_ranks_change_no_loss(tmp_path: Path, tokenizer: Any) -> None:
    write_jsonl(tmp_path / "chats.jsonl", chats(30))
    alone, packed = (sft(tmp_path, packing=each, sequence_length=256) for each in (False, True))
    count = len(build_dataset(packed, "train", 0))
    (losses, weights), *_ = run_on_world(1, train_part, packed, 3, count)
    (other, _), *_ = run_on_world(1, train_part, alone, 1, 29)
    assert other == pytest.approx(losses[:1], rel=1e-12), "the first batch has all records"
    mixed = MixtureDataConfig(sources={"one": {**packed.__dict__}}, sequence_length=256, vocab_size=300)
    for data in (packed, mixed):
        for found, values in run_on_world(2, train_part, data, 3, count):
            assert found == pytest.approx(losses, rel=1e-12)
            assert error(tensors_of(values), tensors_of(weights)) < 1e-10


def composed(folder: Path, *others: str) -> Config:
    config = config_of("data=sft", f"data.path={folder}/chats.jsonl", f"data.tokenizer={folder}/tokenizer", *others)
    validate(config, 1, 1)
    return config


def test_the_vocabulary_reaches_the_model(tmp_path: Path, tokenizer: Any) -> None:
    write_jsonl(tmp_path / "chats.jsonl", chats(3))
    config = composed(tmp_path)
    assert config.data.vocab_size == config.model.vocab_size == len(tokenizer) == 300


def test_mistakes_are_refused_before_submission(tmp_path: Path) -> None:
    tokenizer, data = tmp_path / "tokenizer", tmp_path / "chats.jsonl"
    write_tokenizer(tokenizer, None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    write_jsonl(data, chats(2))
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    (tmp_path / "list.jsonl").write_text('[{"text": "a"}]')
    write_jsonl(tmp_path / "other.jsonl", [{"question": "a", "answer": "b"}])
    write_jsonl(tmp_path / "plain.jsonl", [{"text": "a"}])
    mistakes: dict[str, dict[str, Any]] = {
        "has no chat template": {"path": str(data)},
        "nope.jsonl does not exist": {"path": f"{tmp_path}/nope.jsonl"},
        "contains no .jsonl": {"path": f"{tmp_path}/empty"},
        "splits/train": {"path": f"{tmp_path}/splits"},
        "broken.jsonl:1 is not a JSON object": {"path": f"{tmp_path}/broken.jsonl"},
        "it is a list": {"path": f"{tmp_path}/list.jsonl"},
        "columns question, answer": {"path": f"{tmp_path}/other.jsonl"},
        "data.validation_path": {"validation_path": f"{tmp_path}/no"},
        "empty/tokenizer.json does not exist": {"tokenizer": f"{tmp_path}/empty"},
        "no.jinja cannot be read": {"path": str(data), "chat_template": f"{tmp_path}/no.jinja"},
        "300 token ids, but data.vocab_size is 200": {"vocab_size": 200},
    }
    good = composed(tmp_path, f"data.path={tmp_path}/plain.jsonl").data
    assert SFT.check_inputs is not None
    for message, changes in mistakes.items():
        with pytest.raises(UserError) as found:
            SFT.check_inputs(replace(good, **changes))
        assert message in str(found.value), str(found.value)
    with pytest.raises(UserError, match=r"empty/tokenizer.json does not exist"):
        composed(tmp_path, f"data.tokenizer={tmp_path}/empty")


def test_records_that_do_not_fit_are_named(tmp_path: Path, tokenizer: Any) -> None:
    good, path = chats(3), tmp_path / "chats.jsonl"
    mistakes: dict[str, list[Any]] = {
        "chats.jsonl:4: messages is not a list": [*good, {"messages": "hello"}],
        "chats.jsonl:4: prompt and completion is not text": [*good, {"prompt": ["a"], "completion": "b"}],
        "chats.jsonl:4 has the columns other": [*good, {"other": 1}],
        "chats.jsonl:4 is not a JSON object": [*good, 5],
    }
    for message, made in mistakes.items():
        write_jsonl(path, made)
        with pytest.raises(UserError, match=message):
            build_dataset(sft(tmp_path), "train", 0)
    turns = [{"role": role, "content": "a fox"} for role in ("user", "assistant", "user", "assistant")]
    write_jsonl(path, [{"messages": turns}])
    (tmp_path / "last.jinja").write_text(LAST_ONLY)
    with pytest.raises(UserError, match=r"(?s)chats.jsonl:1.* differently once message 1 .*generation"):
        build_dataset(sft(tmp_path, chat_template=str(tmp_path / "last.jinja")), "train", 0)
    (tmp_path / "raise.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match=r"chats.jsonl:1: the chat template failed: .*no system role"):
        build_dataset(sft(tmp_path, chat_template=str(tmp_path / "raise.jinja")), "train", 0)

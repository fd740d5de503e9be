"""Weights to Hugging Face's Llama and back: the same function there, the same bits here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_train.checkpoint.listing import choose, verified_manifest
from hpc_train.checkpoint.reader import StoredTensors
from hpc_train.checkpoint.transfer import export, export_hf, import_hf
from hpc_train.config.compose import typed
from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError
from hpc_train.models.hf_names import gpt_config, hf_config, hf_name
from hpc_train.models.model import Model
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import freeze
from hpc_train.run.imported import imported_model, model_overrides
from tests.checkpoint.made import commit, quiet_bar
from tests.config.composing import compose
from tests.models.models import with_values
from tests.train.runs import TINY, frozen

SIZES: dict[str, Any] = {"vocab_size": 64, "n_layers": 3, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48}
SIZES["rope_theta"] = 5e5
BOTH = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def model_and_run(path: Path, tied: bool) -> tuple[Model, RunDirectory]:
    """A GPT with random values, and a run whose checkpoint of step 7 holds them."""
    config = GPTConfig(**SIZES, tied_embeddings=tied)
    run = frozen(path, "+strategy=single", "data.vocab_size=64", *model_overrides(config))
    model = with_values(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.mul_(1 if "norm" in name else 5).add_(0.01)  # far from symmetric, so that a mix-up shows
    state: dict[str, Tensor] = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    commit(run, 7, state | {f"optim.{name.removeprefix('model.')}.exp_avg": value for name, value in state.items()})
    return model, run


def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    transformers = pytest.importorskip("transformers")
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert type(llama).__name__ == "LlamaForCausalLM"
    with torch.no_grad():
        return llama(tokens).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Model, RunDirectory]]:
    """A model and its run, tied and untied, for tests that only read them."""
    folder = tmp_path_factory.mktemp("saved")
    return {tied: model_and_run(folder / f"{tied}", tied) for tied in (False, True)}


Saved = dict[bool, tuple[Model, RunDirectory]]


@pytest.fixture(scope="module")
def llama(saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an exported model."""
    folder = tmp_path_factory.mktemp("exported")
    export(saved[False][1], None, folder / "llama", "hf", None, quiet_bar)
    return folder / "llama"


@pytest.mark.parametrize(("tied", "shard_bytes"), [(True, 2**30), (False, 20_000)], ids=["one file", "shards"])
def test_transformers_computes_the_same(saved: Saved, tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    model, run = saved[tied]
    found = choose(run, None)
    stored, passed = StoredTensors(found.path, verified_manifest(found)), list[int]()
    export_hf(stored, model.config, tmp_path / "llama", positions=128, dtype=None, advance=passed.append,
              shard_bytes=shard_bytes)  # fmt: skip
    assert sum(passed) == 4 * sum(value.numel() for value in model.parameters())
    files = [path.stat().st_size for path in (tmp_path / "llama").glob("*.safetensors")]
    assert len(files) == 1 if shard_bytes == 2**30 else len(files) > 5 and max(files) < 21_000
    tokens = torch.randint(0, 64, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens, {})
    torch.testing.assert_close(logits_of(tmp_path / "llama", tokens), expected, rtol=1e-5, atol=1e-5)


@BOTH
def test_back_again_the_tensors_are_the_same_bits(saved: Saved, tmp_path: Path, tied: bool) -> None:
    model, run = saved[tied]
    export(run, None, tmp_path / "llama", "hf", None, quiet_bar)
    result = import_hf(tmp_path / "llama", "back", tmp_path, "float32", quiet_bar)
    back = RunDirectory(tmp_path / "back")
    assert imported_model(back) == model.config
    found = choose(back, None)
    stored = StoredTensors(found.path, verified_manifest(found))
    expected = dict(model.named_parameters())
    assert found.step == 0
    assert {f"model.{name}" for name in expected} == stored.shapes.keys()
    assert dict.fromkeys(expected, True) == {
        name: torch.equal(stored.read(f"model.{name}"), expected[name]) for name in stored.model()
    }
    assert result["parameters"] == sum(value.numel() for value in expected.values())
    assert f"model.tied_embeddings={str(tied).lower()}" in result["overrides"]


def test_another_type_is_rounded_once(saved: Saved, tmp_path: Path) -> None:
    model, run = saved[True]
    export(run, 7, tmp_path / "llama", "hf", "bfloat16", quiet_bar)
    assert json.loads((tmp_path / "llama/config.json").read_text())["torch_dtype"] == "bfloat16"
    import_hf(tmp_path / "llama", "back", tmp_path, "float32", quiet_bar)
    found = choose(RunDirectory(tmp_path / "back"), None)
    stored = StoredTensors(found.path, verified_manifest(found))
    for name, value in model.named_parameters():
        assert torch.equal(stored.read(f"model.{name}"), value.bfloat16().float())


@pytest.mark.parametrize(("tied", "dtype"), [(False, None), (True, "bfloat16")])
def test_one_pt_file_loads_into_the_model(saved: Saved, tmp_path: Path, tied: bool, dtype: str | None) -> None:
    model, run = saved[tied]
    export(run, None, tmp_path / "deep/model.pt", "pt", dtype, quiet_bar)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model.pt"]
    state = torch.load(tmp_path / "deep/model.pt", weights_only=True)
    expected = {name: value.bfloat16().float() if dtype else value for name, value in model.state_dict().items()}
    fresh = with_values(GPTConfig(**SIZES, tied_embeddings=tied))
    fresh.load_state_dict({name: value.float() for name, value in state.items()})
    assert all(torch.equal(value, expected[name]) for name, value in fresh.state_dict().items())
    elements = sum(value.numel() for value in model.parameters())
    assert (tmp_path / "deep/model.pt").stat().st_size < elements * (2 if dtype else 4) + 20_000  # tied: once


def test_the_config_of_either_transformers_is_read() -> None:
    config = GPTConfig(**SIZES)
    four = hf_config(config, 128, "float32")
    five = {key: value for key, value in four.items() if key not in ("rope_theta", "rope_scaling")}
    five["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert gpt_config(four, "") == gpt_config(five, "") == config
    assert gpt_config(four | {"num_key_value_heads": None, "head_dim": None}, "").n_kv_heads == config.n_heads


PUBLISHED = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 4, "max_position_embeddings": 4096}


def exported(run: RunDirectory, to: Path, *names: str) -> list[dict[str, Any]]:
    """Exports ``run`` and returns the content of the files ``names``."""
    export(run, None, to, "hf", None, quiet_bar)
    return [json.loads((to / name).read_text()) for name in names]


def test_imports_and_their_forks_keep_the_end_token(saved: Saved, tmp_path: Path) -> None:
    model, run = saved[False]
    (config,) = exported(run, tmp_path / "llama", "config.json")
    assert config["eos_token_id"] is None and config["max_position_embeddings"] == 8
    (tmp_path / "llama/config.json").write_text(json.dumps(config | PUBLISHED))
    generation = {"eos_token_id": [2, 3, 5], "temperature": 0.6}
    (tmp_path / "llama/generation_config.json").write_text(json.dumps(generation))
    import_hf(tmp_path / "llama", "back", tmp_path, "float32", quiet_bar)
    back = RunDirectory(tmp_path / "back")
    state = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    place = ["+strategy=single", f"run.root={tmp_path}", "data.vocab_size=64", *model_overrides(model.config)]
    tuned = frozen(tmp_path / "tuned", *place, "run.name=back", "run.fork=tuned")
    commit(tuned, 3, state)
    again = frozen(tmp_path / "again", *place, "run.name=tuned", "run.fork=again", "data.sequence_length=8192")
    commit(again, 4, state)
    for fork, positions in ((back, 4096), (tuned, 4096), (again, 8192)):
        found, other = exported(fork, tmp_path / f"{fork.path.name}-hf", "config.json", "generation_config.json")
        assert {name: found[name] for name in PUBLISHED} == PUBLISHED | {"max_position_embeddings": positions}
        assert other == generation
    transformers = pytest.importorskip("transformers")
    llama = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again-hf")
    assert llama.generation_config.eos_token_id == [2, 3, 5] and llama.config.eos_token_id == [2, 3]


def test_the_end_token_of_token_files_is_exported(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = saved[False]
    meta = tmp_path / "tokens/meta.json"
    meta.parent.mkdir()
    meta.write_text(json.dumps({"dtype": "uint16", "vocab_size": 64, "counts": {}, "separator": 63}))
    data = ["data=tokens", f"data.path={meta.parent}", "data.vocab_size=64", "data.sequence_length=16"]
    others = [override for override in TINY if not override.startswith("data")]
    run = RunDirectory(tmp_path / "of-tokens")
    freeze(typed(compose([*others, *data, "+strategy=single", *model_overrides(model.config)])), run)
    commit(run, 7, {f"model.{name}": value.detach() for name, value in model.named_parameters()})
    (config,) = exported(run, tmp_path / "llama", "config.json")
    assert config["eos_token_id"] == 63
    meta.unlink()
    (config,) = exported(run, tmp_path / "second", "config.json")
    assert config["eos_token_id"] is None and "config.json has no end token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"head_dim": 16}, "[32, 32], expected [64, 32]"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "has no low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 32.0}}, "scales its rotary positions"),
        ({"vocab_size": 65}, "[64, 32], expected [65, 32]"),
        ({"num_hidden_layers": 2}, "not part of the model: model.layers.2."),
        ({"num_hidden_layers": 4}, "missing: model.layers.3."),
        ({"tie_word_embeddings": True}, None),  # the copy of the embedding is left out
    ],
)
def test_what_our_model_does_not_compute_is_refused(
    tmp_path: Path, llama: Path, change: dict[str, Any], words: str | None
) -> None:
    shutil.copytree(llama, tmp_path / "llama")
    path = tmp_path / "llama/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if words is None:
        import_hf(tmp_path / "llama", "back", tmp_path, "float32", quiet_bar)
        return
    with pytest.raises(UserError) as caught:
        import_hf(tmp_path / "llama", "back", tmp_path, "float32", quiet_bar)
    assert words in str(caught.value)
    assert not (tmp_path / "back").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    _, run = model_and_run(tmp_path / "run", tied=False)
    file = next(choose(run, 7).path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"damaged: .*the content does not match its checksum"):
        export(run, None, tmp_path / "llama", "hf", None, quiet_bar)
    assert not (tmp_path / "llama").exists()


def test_nothing_is_overwritten(saved: Saved, llama: Path) -> None:
    _, run = saved[False]
    for action in (
        lambda: export(run, None, llama, "hf", None, quiet_bar),
        lambda: export(run, None, llama, "pt", None, quiet_bar),
        lambda: import_hf(llama, run.path.name, run.path.parent, "float32", quiet_bar),
    ):
        with pytest.raises(UserError, match="already exists"):
            action()


def test_the_names_are_one_to_one() -> None:
    config = GPTConfig(**SIZES)
    names = [name for name, _ in with_values(config).named_parameters()]
    assert len({hf_name(config, name) for name in names}) == len(names) == 3 * 9 + 3

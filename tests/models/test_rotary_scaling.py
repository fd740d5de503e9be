"""Llama 3.1's scaled rotary positions against transformers: the tables, and a whole model there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_train.config.compose import typed
from hpc_train.config.schema import GPTConfig
from hpc_train.errors import UserError
from hpc_train.layout.validate import validate
from hpc_train.models.attention import RotaryScaling, rotary_tables
from hpc_train.models.hf_names import gpt_config, hf_config, hf_name
from hpc_train.run.imported import model_overrides
from tests.config.composing import compose
from tests.models.models import with_values

SCALING: dict[str, float] = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0,
}  # fmt: skip
MODEL = GPTConfig(
    vocab_size=64, n_layers=2, dim=64, n_heads=2, n_kv_heads=1, ffn_dim=48, rope_theta=5e5, rope_scaling=SCALING
)


def llama(positions: int) -> Any:
    transformers = pytest.importorskip("transformers")
    values = {key: value for key, value in hf_config(MODEL, positions, "float32").items() if key != "architectures"}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**values, attn_implementation="eager")).eval()


def test_tables_and_logits_are_those_of_transformers() -> None:
    theirs, tokens = llama(512), torch.arange(300).reshape(1, -1) % 64
    positions = torch.arange(512)
    tables = rotary_tables(positions, 32, MODEL.rope_theta, RotaryScaling(**SCALING))
    cosine, sine = (table.squeeze(1) for table in tables)
    sine[:, :16].neg_()  # by their sign the halves change places
    expected = theirs.model.rotary_emb(torch.zeros(1), positions.unsqueeze(0))
    assert torch.allclose(cosine, expected[0][0], atol=1e-4) and torch.allclose(sine, expected[1][0], atol=1e-4)
    plain, _ = rotary_tables(positions, 32, MODEL.rope_theta)
    assert not torch.allclose(cosine, plain.squeeze(1), atol=0.1), "the scaling changes something"

    ours = with_values(MODEL).eval()
    state = {hf_name(MODEL, name): value.detach() for name, value in ours.named_parameters()}
    assert theirs.load_state_dict(state, strict=False).unexpected_keys == []
    with torch.no_grad():
        assert torch.allclose(ours(tokens, {}), theirs(tokens).logits, atol=1e-5)


def test_the_config_goes_there_and_back(tmp_path: Path) -> None:
    assert gpt_config(hf_config(MODEL, 512, "float32"), "config.json") == MODEL
    overrides = [*model_overrides(MODEL), "+strategy=single", "data=synthetic", "data.vocab_size=64"]
    config = typed(compose([*overrides, "model.dropout=0.0"]))
    assert config.model == MODEL
    validate(config, 1, 1)


@pytest.mark.parametrize("change", [{"factor": 0.0}, {"low_freq_factor": 4.0}, {"other": 1.0}])
def test_what_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    scaling = [f"++model.rope_scaling.{name}={value}" for name, value in (SCALING | change).items()]
    with pytest.raises(UserError, match="factor"):
        validate(typed(compose(["+strategy=single", *scaling])), 1, 1)

"""Every key is documented, its default is valid, and docs/config.md is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import MISSING

from hpc_train.config.extensions import FAMILIES, SOURCES, load_family, load_source
from hpc_train.config.schema import Config
from hpc_train.config.schema.key import KeyInfo, check_keys, keys
from hpc_train.errors import UserError
from hpc_train.layout.reference import reference
from hpc_train.layout.validate import check_values

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
SCHEMAS = [Config, *(load_family(kind).schema for kind in FAMILIES), *(load_source(kind).schema for kind in SOURCES)]


def test_the_page_is_up_to_date() -> None:
    if not PAGE.exists():
        pytest.skip("there is no docs/config.md")
    assert PAGE.read_text() == reference(), "python -m hpc_train.layout.reference > docs/config.md"


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_every_key_has_a_sentence_and_a_default_that_it_accepts(schema: type) -> None:
    facts: dict[str, KeyInfo] = {name: info for name, value, info in keys(schema()) if value != MISSING}
    assert all(info.meaning.endswith(".") for info in facts.values())
    check_keys(schema(**{name: 1 for name, value, _ in keys(schema()) if value == MISSING}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dp", 0, "strategy.dp is 0, but must be at least 1"),
        ("dp", "all", "strategy.dp is 'all'"),
        ("schedule", "1f1", "did you mean 1f1b?"),
        ("compression_share", 1.5, "above 0 and at most 1"),
    ],
)
def test_a_value_that_its_key_does_not_accept_is_refused(key: str, value: object, message: str) -> None:
    config = Config()
    setattr(config.strategy, key, value)
    with pytest.raises(UserError) as error:
        check_values(config)
    assert message in str(error.value) and error.value.where == f"strategy.{key}"

"""Lets the commands of these tests share what Hydra has composed."""

from __future__ import annotations

import pytest

from tests.config.composing import share_compositions


@pytest.fixture(autouse=True)
def shared_compositions(monkeypatch: pytest.MonkeyPatch) -> None:
    share_compositions(monkeypatch)

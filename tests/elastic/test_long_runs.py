"""The agent of a long run: its memory, threads and number of files do not grow with the steps."""

from __future__ import annotations

import json

import pytest

from tests.checkpoint.progress import IN_LONG_FORM
from tests.elastic.conftest import Freeze
from tests.elastic.entries import start_agent

STEPS = 100_000
GROWTH_BYTES = 4 << 20  # an agent that reads all lines at each look grows by 0.6 MB per 1,000 steps


@IN_LONG_FORM  # test_progress has a look that reads only what is new
@pytest.mark.timeout(3600)
def test_an_agent_does_not_grow_with_the_steps(frozen: Freeze) -> None:
    run = frozen(workers=1)
    agent = start_agent(run.path, "logs_many_steps", FOREGROUND="1", STEPS=str(STEPS))
    _, error = agent.communicate(timeout=3600)
    assert agent.returncode == 0, error
    found = json.loads((run.path / "mark-0").read_text().partition(" ")[2])
    print(f"{STEPS} steps, after each tenth: {found}")
    first, last = found[len(found) // 2 - 1], found[-1]
    assert last["memory"] - first["memory"] < GROWTH_BYTES
    assert last["threads"] == first["threads"]
    assert last["files"] <= first["files"] + 1  # a lock that is being taken
    assert run.read_metrics()[-1]["step"] == STEPS

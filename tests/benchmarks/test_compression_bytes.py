"""Bytes on the wire of a training step with each compression, by the kernel's counters."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.compression_link import TECHNIQUES
from tests.doors.command import REPOSITORY, environment

UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]
RANK = f"{sys.executable} -m benchmarks.compression_link --address 127.0.0.1 --device lo --steps 1 --rank"


def own_network() -> bool:
    """Whether this user may have a network of their own here."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*UNSHARE, "ip", "link", "set", "lo", "up"], check=False).returncode == 0
    )


@pytest.mark.long_form(25)
@pytest.mark.skipif(not own_network(), reason="no network namespaces for this user")
def test_compressed_gradients_are_as_small_on_the_wire_as_they_should_be() -> None:
    """Two ranks over the loopback device of a namespace that nobody else is in: it counts what both send."""
    both = f"ip link set lo up; {RANK} 1 > /dev/null & exec {RANK} 0"
    env = environment(GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", both], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    dense = 2 * 4 * found["none"]["elements"]  # each of two ranks sends every element once
    sent = {technique: found[technique]["bytes"] / dense for technique in TECHNIQUES}
    assert 1 <= sent["none"] < 1.05
    assert 0.5 <= sent["fp16"] < 0.53
    assert 0.5 <= sent["bf16"] < 0.53
    assert 0.02 <= sent["topk"] < 0.03, "one element in a hundred, and its index"
    assert 0.02 < sent["powersgd"] < 0.04, "rank 4 of matrices of 256 and 512"

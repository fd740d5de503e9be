"""How a config.json of the hub is read where there is no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from socket import socket

import pytest

pytest.importorskip("huggingface_hub")
READ = "from hpc_train.config.hf_config import read; print(read('some/model', None, {}))"


def read_without_network(home: Path) -> tuple[str, str]:
    """Reads a config.json from a hub that nobody serves; returns what is printed and the log."""
    with socket() as unused:
        unused.bind(("127.0.0.1", 0))  # which refuses connections
        own = {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own
        done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def test_the_request_is_not_repeated(tmp_path: Path) -> None:
    """huggingface_hub itself would repeat it for 23 seconds, and write a line to the log each time."""
    assert read_without_network(tmp_path) == ("None", "")


def test_the_cache_is_read_then(tmp_path: Path) -> None:
    cached = tmp_path / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("a" * 40) / "config.json").write_text('{"model_type": "llama"}')
    assert read_without_network(tmp_path) == ("{'model_type': 'llama'}", "")

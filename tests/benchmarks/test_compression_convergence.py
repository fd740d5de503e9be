"""The plot of each compression against dense gradients is drawn from real runs."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.compression_convergence import main
from tests.checkpoint.progress import IN_LONG_FORM
from tests.doors.command import TINY


@IN_LONG_FORM  # a benchmark
def test_the_losses_are_written_and_drawn(tmp_path: Path) -> None:
    model = [argument for argument in TINY if not argument.startswith(("train.steps", "telemetry.wandb"))]
    main(["--out", str(tmp_path), "--steps", "3", "--runs", "none,topk", *model, "cluster.gpus_per_node=0"])
    with (tmp_path / "compression_convergence.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = {(row["technique"], int(row["step"])): float(row["loss"]) for row in rows}
    assert set(losses) == {(technique, step) for technique in ("none", "topk") for step in (1, 2, 3)}
    assert losses["none", 1] == losses["topk", 1] and losses["none", 3] != losses["topk", 3]
    assert (tmp_path / "compression_convergence.png").read_bytes().startswith(b"\x89PNG")

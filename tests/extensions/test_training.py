"""A model family and a data source of a package outside the repository, from the dry run to the export."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.run.directory import RunDirectory
from tests.doors.command import REPOSITORY, environment, hpc_train
from tests.extensions.model_and_data import overrides, write_package

SHORT = [
    "batch.global_size=8",
    "train.steps=4",
    "telemetry.log_every=1",
    "telemetry.wandb.mode=disabled",
    "cluster=local",
    "cluster.gpus_per_node=0",
    "cluster.cpu_workers=2",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    write_package(folder / "lib", "user_package")
    return folder


def call(place: Path, *arguments: str) -> str:
    env = environment(PYTHONPATH=f"{place / 'lib'}:{REPOSITORY}")
    done = hpc_train(*arguments, cwd=place, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(place: Path, strategy: str, *more: str) -> list[float]:
    call(place, f"+strategy={strategy}", *overrides("user_package"), *SHORT, f"run.name={strategy}", *more)
    return [line["loss"] for line in RunDirectory(place / "outputs" / strategy).read_metrics()]


@pytest.mark.long_form(10)  # test_extensions.py trains with a family
def test_the_dry_run_shows_an_estimate_of_memory(place: Path) -> None:
    shown = call(place, "+strategy=dp", *overrides("user_package"), *SHORT, "-m", "launch.dry_run=true")
    assert "iB (parameters" in shown


@pytest.mark.long_form(60)
def test_tensor_parallelism_has_the_losses_of_one_process_and_the_export_uses_the_names_of_the_family(
    place: Path,
) -> None:
    alone = losses(place, "single")
    assert len(alone) == 4 and alone[-1] < alone[0]
    assert losses(place, "tp") == pytest.approx(alone, rel=1e-4)
    call(place, "checkpoint", "export", "outputs/tp", "--format", "hf", "--to", "exported")
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(place / "exported" / "model.safetensors", framework="pt") as file:
        assert "mixer.layers.1.ffn.w1.weight" in set(file.keys())
    assert '"mixer"' in (place / "exported" / "config.json").read_text()

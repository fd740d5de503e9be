"""Compares the time and the memory of a run with the prediction for its layout and machine.

The comparison is recorded at the end of a job, in ``run.json`` (``prediction``) and in the calibration file of the run
root, from which ``plan`` learns (see ``planner/calibration.py``). A run on an unknown GPU, on CPUs, or with a model of
unknown size has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.layout.layout import Layout
from hpc_train.planner.calibration import FILE, as_line, key_of, measured_values, predicted_values
from hpc_train.planner.machine import Machine, read_machine, recognized
from hpc_train.planner.prediction import predict_step
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, section, table
from hpc_train.run.directory import RunDirectory
from hpc_train.run.file_lock import exclusive
from hpc_train.run.files import append_line
from hpc_train.run.freeze import load
from hpc_train.run.rows import check_fields
from hpc_train.units import format_bytes

NAMES = {
    "step_s": "step", "compute_s": "computation and optimizer", "communication_s": "exposed communication",
    "bubble_s": "pipeline bubble", "memory_bytes": "memory of the fullest rank",
}  # fmt: skip


def compare(run: RunDirectory, machine: Machine | None = None) -> dict[str, Any] | None:
    """Records what was predicted and measured for the newest attempt in ``run.json`` and returns it.

    Args:
        machine: that of the run; by default that of ``cluster.machine``, which is a shipped one if the GPUs of the
            run are called like its device.

    Returns:
        None if there is no prediction, or fewer than three lines of metrics.

    Raises:
        UserError, OSError: a file of the run cannot be read or written.
    """
    attempt = run.newest_attempt()
    if attempt < 0:
        return None
    meeting = run.attempt_record(attempt)
    config = load(run)
    machine = machine or _machine_of(run, config, meeting)
    if machine is None or not meeting.get("layout", {}).get("micro_batches"):  # custom code has no layout
        return None
    try:
        layout = Layout(**meeting["layout"] | {"notes": ()})
        check_fields(layout)
    except TypeError:  # that of another version, or damaged
        return None
    lines = [line for line in run.read_all_metrics() if line.attempt == attempt]
    measured = measured_values(lines, layout.cp * layout.tp, on_gpu=meeting.get("gpus_per_node", 0) > 0)
    if measured is None:
        return None
    try:
        step = predict_step(config, layout, machine.with_devices(meeting.get("workers_per_node", 1)))
    except UserError:  # a model of unknown size
        return None
    predicted = predicted_values(step)
    comparison = as_line(key_of(config, machine), run.path, str(layout), predicted, measured)
    run.update_record(prediction=comparison)
    return comparison


def remember(config: Config, comparison: Mapping[str, Any]) -> None:
    """Appends the comparison of a run to the calibration file of its root.

    Raises:
        OSError: it cannot be written.
    """
    root = Path(config.run.root).absolute()
    with exclusive(root / ".locks" / "calibration"):
        append_line(root / FILE, dict(comparison))


def _machine_of(run: RunDirectory, config: Config, meeting: Mapping[str, Any]) -> Machine | None:
    """Returns the machine that ``cluster.machine`` names, or the shipped one whose device matches all GPUs.

    Raises:
        UserError: the machine file cannot be read.
    """
    if config.cluster.machine != "auto":
        return read_machine(config.cluster.machine)
    if not meeting.get("gpus_per_node"):
        return None
    machines = run.json(run.fabric)["machines"]
    models = {gpu.get("model") for machine in machines for gpu in machine["facts"]["gpus"]}
    if len(models) != 1:
        return None
    return recognized(str(models.pop()))


def prediction(facts: RunFacts) -> Html | None:
    """Returns the section that compares the prediction with the measurement; None if there is none."""
    comparison = facts.record.get("prediction")
    if not comparison:
        return None
    rows = []
    for key, name in NAMES.items():
        predicted = comparison["predicted"].get(key)
        measured = comparison["measured"].get(key)
        if predicted is not None and measured is not None:
            ratio = f"{measured / predicted:.2f}" if predicted else ""
            rows.append([name, _shown(key, predicted), _shown(key, measured), ratio])
    words = f"Per step, as predicted for the machine {comparison['machine']} without what earlier runs have taught."
    columns = ("", "predicted", "measured", "measured / predicted")
    return section("Prediction", block("paragraph", words), table("Predicted and measured", columns, rows, numbers=3))


def _shown(key: str, value: float) -> str:
    return format_bytes(value) if key == "memory_bytes" else f"{value:.3g} s"

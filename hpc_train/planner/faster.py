"""Names settings with which the planner predicts a much shorter step on the GPUs of a job. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from hpc_train.config.extensions import FAMILIES
from hpc_train.config.schema import Config
from hpc_train.config.values import runs_own_code
from hpc_train.errors import UserError
from hpc_train.layout.layout import JobShape, Layout
from hpc_train.layout.validate import validate
from hpc_train.planner.machine import Machine, machine_of_job
from hpc_train.planner.prediction import predict_step

LEAST_FACTOR = 1.15  # the smallest ratio of two predicted steps that is named; assumed
COMPILATION_S = 120.0  # the compilation at the start of a run; assumed


def faster_settings(config: Config, layout: Layout, shape: JobShape) -> list[str]:
    """Returns a note for each setting that makes the steps of a job on GPUs much longer than necessary."""
    if not shape.gpus or runs_own_code(config):
        return []
    try:
        machine = machine_of_job(config.cluster.machine, shape.gpus, shape.gpu_types)
    except UserError:
        return [UNKNOWN] if _in_full_fp32(config) else []
    return [*predicted_notes(config, layout, machine, shape.nodes, shape.workers)]


UNKNOWN = (
    "note: precision=fp32 without TF32 uses a fraction of the matrix units of a GPU; precision=bf16 is several times "
    "faster on GPUs that have it (A100 and later), and precision.tf32=true lies between the two"
)


def predicted_notes(config: Config, layout: Layout, machine: Machine, nodes: int, workers: int) -> Iterator[str]:
    """Yields the notes with predicted times for ``nodes`` x ``workers`` devices. For a model of unknown size, it yields
    the note about fp32 without times.
    """
    try:
        step_s = predict_step(config, layout, machine).step_s
    except UserError:
        if _in_full_fp32(config) and machine.rates.bf16_flops:
            yield UNKNOWN
        return
    try:
        if _in_full_fp32(config) and machine.rates.bf16_flops:
            config = replace(config, precision=replace(config.precision, name="bf16"))
            in_bf16 = predict_step(config, layout, machine).step_s
            if step_s > LEAST_FACTOR * in_bf16:
                yield (
                    f"note: precision=fp32 without TF32: a step is predicted to take {step_s:.3g} s on {machine.name}, "
                    f"with precision=bf16 {in_bf16:.3g} s ({step_s / in_bf16:.1f} times faster); "
                    "precision.tf32=true lies between the two"
                )
            step_s = in_bf16
        if config.train.compile or config.model.kind not in FAMILIES or machine.rates.cores:
            return
        config = replace(config, train=replace(config.train, compile=True))
        validate(config, nodes, workers)
        compiled = predict_step(config, layout, machine).step_s
        saved_s = (step_s - compiled) * (config.train.steps or math.inf)
        if step_s > LEAST_FACTOR * compiled and saved_s > COMPILATION_S:
            yield (
                f"note: train.compile=false: a step in {config.precision.name} is predicted to take {step_s:.3g} s on "
                f"{machine.name}, with train.compile=true {compiled:.3g} s ({step_s / compiled:.1f} times faster)"
            )
    except UserError:  # the setting cannot be combined with others of this config
        return


def _in_full_fp32(config: Config) -> bool:
    return config.precision.name == "fp32" and not config.precision.tf32

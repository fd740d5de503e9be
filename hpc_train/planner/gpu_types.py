"""Finds the machine file of a job by the types of its GPUs, as Slurm or the driver names them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection

from hpc_train.errors import UserError
from hpc_train.planner.machine import Machine, read_machine, shipped

KEY = "cluster.machine"
OF_CPUS = "cpu"
OTHER_CARDS = ("pcie", "nvl")  # have other links and lower rates than the cards of the machine files
# vendor and family, the socket, and the kind of memory: drivers of different ages write them differently
_SAME = re.compile(r"NVIDIA|AMD|INSTINCT|TESLA|SXM\d?|HBM\d\w?|OAM|VF")


def machine_of_job(asked: str, gpus: int, types: Collection[str]) -> Machine:
    """Returns the machine file that ``cluster.machine`` names; for ``auto`` that of the GPUs, or of CPUs without GPUs.

    Args:
        gpus: GPUs per node.
        types: the types of GPUs that the job may get; empty if they are unknown.

    Raises:
        UserError: no file, or more than one, describes them.
    """
    name = asked if asked != "auto" else _found(gpus, types)
    try:
        return read_machine(name)
    except UserError as error:
        raise UserError(error.what, where=KEY, fix=error.fix) from error


def _found(gpus: int, types: Collection[str]) -> str:
    if not gpus:
        return OF_CPUS
    if not types:
        raise UserError(
            "strategy=auto needs the type of the GPUs, which neither the config nor Slurm names",
            where=f"{KEY}, cluster.gpu_type",
            fix=f"{KEY}=NAME with {_listed(_of_gpus())}, or the path of your machine file",
        )
    files = sorted({name for each in types for name in files_of(each)})
    if len(files) == 1 and all(map(files_of, types)):
        return files[0]
    seen = _listed(sorted(types))
    if not files:
        raise UserError(
            f"no machine file describes the GPU type {seen}",
            where=KEY,
            fix=f"{KEY}=NAME with the nearest of {_listed(_of_gpus())}, or the path of your machine file",
        )
    raise UserError(
        f"the GPU type {seen} does not decide which machine file describes the job: {_listed(files)}",
        where=f"{KEY}, cluster.gpu_type",
        fix=" or ".join(f"{KEY}={name}" for name in files),
    )


def files_of(gpu_type: str) -> list[str]:
    """Returns the shipped files that describe a type such as ``a100`` or ``nvidia_a100-sxm4-80gb``."""
    words = set(re.split(r"[^a-z0-9]+", gpu_type.lower()))
    if words & {*OTHER_CARDS}:
        return []
    sizes = {found[1] for word in words if (found := re.fullmatch(r"(\d+)(?:gb?)?", word))}
    files = []
    for name in _of_gpus():
        model, _, size = name.partition("-")
        if words & {model, model.removesuffix("x")} and (not size or not sizes or size in sizes):
            files.append(name)
    return files


def _of_gpus() -> list[str]:
    return [name for name in shipped() if not name.startswith(OF_CPUS)]


def _listed(names: Collection[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def recognized(gpu: str) -> Machine | None:
    """Returns the shipped machine whose device is called ``gpu``; None if there is none.

    Variants of a chip have other rates and are other devices: ``NVIDIA H100 PCIe`` is not ``NVIDIA H100 80GB HBM3``.
    """
    wanted = _words(gpu)
    machines = (read_machine(name) for name in shipped())
    return next((machine for machine in machines if _words(machine.device) == wanted), None)


def _words(name: str) -> list[str]:
    """Returns the words that distinguish models: A100 and 80GB of ``NVIDIA A100-SXM4-80GB``."""
    words = re.split(r"[\s-]+", name.upper())
    return [word for word in words if word and not _SAME.fullmatch(word)]

"""Runs agents and workers in a container: Apptainer, or pyxis if the site's ``srun`` has it.

The batch script runs outside of the container and communicates with the agents through files in the run directory. The
root of all runs (with the frozen code), the data and node-local space are mounted under their paths on the host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.shell import shell_command, shell_word
from hpc_train.machine.amd_gpus import amd_memory
from hpc_train.machine.gpus import Machine
from hpc_train.schedulers.slurm.client import query

LOCAL = ("SLURM_TMPDIR", "TMPDIR")  # node-local space, for caches
IN_SHELL = "HPC_TRAIN_BINDS"  # placeholder for the variable BINDS of a batch script


@dataclass(frozen=True)
class Container:
    """An image and its mounts, as ``/host:/inside``. ``gpus``: mount the libraries of the driver too, with ``rocm``
    those of ROCm.
    """

    image: str
    pyxis: bool
    binds: tuple[str, ...]
    gpus: bool
    rocm: bool = False

    def srun_options(self, binds: str) -> list[str]:
        """Returns the options of ``srun`` for pyxis."""
        return [f"--container-image={self.image}", f"--container-mounts={binds}"] if self.pyxis else []

    def command(self, binds: str) -> list[str]:
        """Returns the prefix of a command that runs inside the container."""
        if self.pyxis:
            return []
        libraries = ["--rocm" if self.rocm else "--nv"] if self.gpus else []
        return ["apptainer", "exec", *libraries, "--bind", binds, self.image]

    def seen(self, environment: Mapping[str, str] = os.environ) -> str:
        """Returns the mounts, including the node-local directories of this job."""
        local = [environment[name] for name in LOCAL if environment.get(name)]
        return ",".join(dict.fromkeys([*self.binds, *(_same(path) for path in local if Path(path).is_dir())]))

    def lines(self) -> list[str]:
        """Returns bash lines that set the variable BINDS."""
        names = " ".join(f'"${{{name}:-}}"' for name in LOCAL)
        return [
            "# what the container sees of a node: the runs with their code, data, and node-local space",
            f"BINDS={shell_word(','.join(self.binds))}",
            f'for local in {names}; do [ ! -d "$local" ] || BINDS="$BINDS,$local:$local"; done',
            *([_ROCM] if self.gpus and not self.pyxis and not self.rocm else []),
        ]


# at submission the nodes' kind of GPU may be unknown; the variable is the option --rocm
_ROCM = "[ ! -e /dev/kfd ] || [ -e /dev/nvidiactl ] || export APPTAINER_ROCM=1  # AMD GPUs"


def _of_amd(gpu_type: str | None) -> bool:
    """Returns whether the GPUs are AMD's, by the type requested or else by those of this machine."""
    return amd_memory(gpu_type) is not None if gpu_type is not None else Machine.this().amd() is not None


def container_of(config: Config, gpus: int) -> Container | None:
    """Returns the container of ``cluster.container``; None without an image.

    Raises:
        UserError: the image is a file that does not exist.
    """
    asked = config.cluster.container
    if asked.image is None:
        return None
    image = asked.image
    if image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh")):
        image = str(Path(image).expanduser().absolute())
        if not Path(image).exists():
            raise UserError(
                f"image {image} does not exist", where="cluster.container.image", fix="the path of a .sif or .sqsh file"
            )
    auto = asked.runtime == "auto"
    pyxis = (not image.endswith(".sif") and srun_has_pyxis()) if auto else asked.runtime == "pyxis"
    sources = getattr(config.data, "sources", {}).values()
    paths = [getattr(config.data, "path", None), *(source.get("path") for source in sources)]
    inputs = [str(Path(path).absolute()) for path in paths if path and Path(path).is_dir()]
    root = str(Path(config.run.root).expanduser().absolute())
    binds = tuple(dict.fromkeys(map(_same, [root, *inputs, *asked.binds])))
    return Container(image, pyxis, binds, gpus > 0, gpus > 0 and _of_amd(config.cluster.gpu_type))


def quoted(parts: Sequence[str]) -> str:
    """Returns the command ``parts`` as bash text, in which ``IN_SHELL`` is replaced by the variable BINDS."""
    return shell_command(parts).replace(IN_SHELL, '"$BINDS"')


def _same(bind: str) -> str:
    """Returns ``bind`` with a path inside, by default the same path as on the host."""
    return bind if ":" in bind else f"{bind}:{bind}"


@cache
def srun_has_pyxis() -> bool:
    """Returns whether ``srun`` starts containers with pyxis; cached per process."""
    return "--container-image" in (query(["srun", "--help"]) or "")

"""Agents and workers in a container: Apptainer, or pyxis where the site has it in its ``srun``.

The batch script stays outside: it asks Slurm for a requeue by files that the agents leave in the run directory. The
container sees the root of all runs (with the frozen code), the data and node-local space under the paths they have on
the host. Slurm's variables and those of ``cluster.env`` reach it by themselves.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.slurm.client import query

LOCAL = ("SLURM_TMPDIR", "TMPDIR")  # node-local space, where caches go
IN_SHELL = "HPC_TRAIN_BINDS"  # stands for the variable BINDS of a batch script


@dataclass(frozen=True)
class Container:
    """An image and what of the host it sees, as ``/host:/inside``; ``gpus``: the driver's libraries too."""

    image: str
    pyxis: bool
    binds: tuple[str, ...]
    gpus: bool

    def srun_options(self, binds: str) -> list[str]:
        """What pyxis adds to ``srun``."""
        return [f"--container-image={self.image}", f"--container-mounts={binds}"] if self.pyxis else []

    def command(self, binds: str) -> list[str]:
        """What stands before a command that is to run inside."""
        if self.pyxis:
            return []
        return ["apptainer", "exec", *(["--nv"] if self.gpus else []), "--bind", binds, self.image]

    def seen(self, environment: Mapping[str, str] = os.environ) -> str:
        """The directories, with the node-local ones of this job."""
        local = [environment[name] for name in LOCAL if environment.get(name)]
        return ",".join(dict.fromkeys([*self.binds, *(_same(path) for path in local if Path(path).is_dir())]))

    def lines(self) -> list[str]:
        """Bash lines that set BINDS."""
        names = " ".join(f'"${{{name}:-}}"' for name in LOCAL)
        return [
            "# what the container sees of a node: the runs with their code, data, and node-local space",
            f"BINDS={shlex.quote(','.join(self.binds))}",
            f'for local in {names}; do [ ! -d "$local" ] || BINDS="$BINDS,$local:$local"; done',
        ]


def container_of(config: Config, gpus: int) -> Container | None:
    """What ``cluster.container`` asks for; None where it names no image.

    Raises:
        UserError: the image is a file that is not there.
    """
    asked = config.cluster.container
    if asked.image is None:
        return None
    image = asked.image
    if image.startswith(("/", ".", "~")) or image.endswith((".sif", ".sqsh")):
        image = str(Path(image).expanduser().absolute())
        if not Path(image).exists():
            raise UserError(
                f"there is no image {image}", where="cluster.container.image", fix="the path of a .sif or .sqsh file"
            )
    auto = asked.runtime == "auto"
    pyxis = (not image.endswith(".sif") and srun_has_pyxis()) if auto else asked.runtime == "pyxis"
    data = getattr(config.data, "path", None)
    inputs = [str(Path(data).absolute())] if data and Path(data).is_dir() else []
    root = str(Path(config.run.root).expanduser().absolute())
    return Container(image, pyxis, tuple(dict.fromkeys(map(_same, [root, *inputs, *asked.binds]))), gpus > 0)


def quoted(parts: Sequence[str]) -> str:
    """``parts``, made with ``IN_SHELL`` for the binds, as text of a batch script."""
    return shlex.join(parts).replace(IN_SHELL, '"$BINDS"')


def _same(bind: str) -> str:
    """Under the same path inside, unless told otherwise."""
    return bind if ":" in bind else f"{bind}:{bind}"


@cache
def srun_has_pyxis() -> bool:
    """Whether this site's ``srun`` starts containers. Asked once per process."""
    return "--container-image" in (query(["srun", "--help"]) or "")

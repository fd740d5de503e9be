"""Gives the parameters and buffers of a transformers model their first values, one at a time.

A parameter is read from the files of the model, or else drawn by the model's own initializer on a copy of the one
module that owns it, from the seed of the parameter. So the values are the same under every layout, and no rank ever
holds more than one full parameter besides its own shards.

Buffers that are not in files, such as the frequencies of rotary positions, are computed by the same initializer, as
``from_pretrained`` does.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.hf.weights import WeightFiles
from hpc_train.models.model import aliases, canonical_name


class FirstValues:
    """Provides the first values of a model.

    Args:
        module: the whole model on ``meta`` with tied weights; it is copied.
        files: the weights to read; None draws all of them.

    Attributes:
        tied: alias -> canonical name of tied parameters, in the names of transformers.

    Raises:
        UserError: a stored tensor does not have the shape of the parameter.
    """

    def __init__(self, module: nn.Module, files: WeightFiles | None) -> None:
        self._skeleton: Any = copy.deepcopy(module)
        self._files = files
        self.tied = aliases(module.named_parameters(remove_duplicate=False))
        others: dict[str, list[str]] = {}
        for alias, name in self.tied.items():
            others.setdefault(name, []).append(alias)
        self._stored: dict[str, str] = {}  # parameter -> the name under which the files have it
        names = [name for name, _ in module.named_parameters()]
        for name in [*names, *(name for name, _ in module.named_buffers())] if files is not None else ():
            stored_name = next((candidate for candidate in (name, *others.get(name, ())) if candidate in files), None)  # type: ignore[operator]
            if stored_name is not None:
                self._stored[name] = stored_name
        if files is not None:
            self._check(names)

    def __deepcopy__(self, memo: Any) -> FirstValues:
        return self  # it does not change, and pipeline stages share it

    def _check(self, names: list[str]) -> None:
        """Refuses other shapes in the body of the model; a head of another size is drawn, as for new classes."""
        assert self._files is not None
        body = f"{self._skeleton.base_model_prefix}."
        for name in names:
            expected = tuple(self._skeleton.get_parameter(name).shape)
            stored_shape = self._files.shape(self._stored[name]) if name in self._stored else expected
            if stored_shape != expected and name.startswith(body):
                raise UserError(
                    f"{name} has the shape {list(stored_shape)} in the files, but {list(expected)} in the model",
                    where="model.name_or_path, model.config",
                    fix="remove the values of model.config that change sizes, or set model.pretrained=false",
                )
            if stored_shape != expected:
                del self._stored[name]
        if not any(name in self._stored for name in names):
            raise UserError(
                f"the files have no parameter of {type(self._skeleton).__name__}",
                where="model.name_or_path, model.task",
                fix="the directory of such a model, or model.pretrained=false",
            )
        new = [name for name in names if name not in self._stored]
        if new and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"the files have no values for {', '.join(new[:4])}{' and others' if len(new) > 4 else ''}; they are "
                "drawn at random",
                stacklevel=2,
            )

    def is_stored(self, name: str) -> bool:
        """Returns whether the files have the parameter."""
        return name in self._stored

    def read(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        """Returns a box of a parameter in its stored dtype; None if the files do not have the parameter."""
        if self._files is None or not self.is_stored(name):
            return None
        return self._files.read(self._stored[name], begin, size)

    def fill(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fills the full parameter ``name`` in place."""
        stored = self.read(name, (0,) * value.ndim, tuple(value.shape))
        value.copy_(self._drawn(name, generator.initial_seed()) if stored is None else stored)

    def _drawn(self, name: str, seed: int) -> Tensor:
        path, _, attribute = name.rpartition(".")
        shell = _shell(self._skeleton.get_submodule(path), parameters=True)
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(seed)
            self._initialize(path, shell)
            if shell._parameters[attribute].isnan().any() and hasattr(shell, "reset_parameters"):  # type: ignore[union-attr]
                torch.manual_seed(seed)
                shell.reset_parameters()  # type: ignore[operator]
        drawn = shell._parameters[attribute]
        assert drawn is not None
        if drawn.isnan().any():
            raise UserError(
                f"{type(self._skeleton).__name__} does not define the first values of {name}",
                where="model",
                fix="files that contain this parameter, with model.pretrained=true",
            )
        return drawn.detach()

    def _initialize(self, path: str, shell: nn.Module) -> None:
        """Calls the initializer of the innermost model of transformers that contains the module ``path``."""
        owner: Any = self._skeleton
        walk = self._skeleton
        for part in path.split(".") if path else ():
            walk = walk.get_submodule(part)
            owner = walk if hasattr(walk, "_init_weights") else owner
        owner._init_weights(shell)

    def fill_buffers(self, module: nn.Module, path: str, device: torch.device) -> None:
        """Moves the buffers of ``module`` and its submodules to ``device`` and fills them.

        Args:
            path: the name of ``module`` in the whole model.
        """
        for name, part in module.named_modules():
            if not part._buffers:
                continue
            where = canonical_name(".".join(filter(None, (path, name))))
            shell = _shell(self._skeleton.get_submodule(where), parameters=False)
            with torch.random.fork_rng(devices=()), torch.no_grad():
                self._initialize(where, shell)
            for key, buffer in part._buffers.items():
                if buffer is None:
                    continue
                full_name = ".".join(filter(None, (where, key)))
                stored = self.read(full_name, (0,) * buffer.ndim, tuple(buffer.shape))
                computed = shell._buffers[key] if stored is None else stored
                assert computed is not None
                part._buffers[key] = computed.to(device, buffer.dtype if buffer.is_floating_point() else None)


def _shell(module: nn.Module, parameters: bool) -> nn.Module:
    """Returns a copy of ``module`` without memory for submodules, with its own buffers on the CPU.

    Args:
        parameters: whether its own parameters also get memory; initializers leave the others alone.
    """
    shell = copy.copy(module)
    device = torch.device("cpu" if parameters else "meta")
    shell._parameters = {
        name: None
        if value is None
        else nn.Parameter(torch.full(value.shape, torch.nan, dtype=torch.float32, device=device))
        for name, value in module._parameters.items()
    }
    shell._buffers = {
        name: None if value is None else torch.zeros(value.shape, dtype=value.dtype)
        for name, value in module._buffers.items()
    }
    return shell

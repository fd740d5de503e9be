"""Finds the blocks of a module without ``layers``: its repeated parts, which are sharded, recomputed and compiled
separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from hpc_train.errors import UserError


def find_blocks(module: nn.Module, wrap: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of the blocks within ``module``, in order; a block is never inside another one.

    They are the modules of the classes ``wrap``; without it those of the classes that ``_no_split_modules`` names, as
    in models of transformers, if they are repeated; else the elements of the ModuleList with the most parameters whose
    elements have one class. Containers, which are not called, are replaced by the modules in them: a list of lists
    ``[attention, feed_forward]`` gives two blocks per element. A block that shares a parameter with the rest of the
    module is left out, since both need it at the same time.

    Raises:
        UserError: no module has a class of ``wrap``.
    """
    if wrap is not None:
        names = _of_classes(module, wrap, least=1)
        missing = set(wrap) - {type(module.get_submodule(name)).__name__ for name in names}
        if missing:
            classes = sorted({type(part).__name__ for part in module.modules() if part is not module})
            raise UserError(
                f"the model has no module of class {', '.join(sorted(missing))} that is not inside another block",
                where="model.wrap",
                fix=f"classes of this model: {', '.join(classes)}",
            )
    else:
        named = getattr(module, "_no_split_modules", None) or ()
        names = _of_classes(module, [name for name in named if isinstance(name, str)], least=2)
        names = names or _longest_list(module)
    return tuple(_separate(module, [called for name in names for called in _called(module, name)]))


def _called(module: nn.Module, name: str) -> Iterator[str]:
    """Yields ``name``, or the modules with parameters in it if it has no ``forward``, like a ModuleList."""
    part = module.get_submodule(name)
    if type(part).forward is not nn.Module.forward:
        yield name
        return
    for child, inner in part.named_children():
        if any(True for _ in inner.parameters()):
            yield from _called(module, f"{name}.{child}")


def _of_classes(module: nn.Module, classes: Iterable[str], least: int) -> list[str]:
    """Returns the outermost modules of those ``classes`` that have at least ``least`` instances with parameters."""
    class_names = set(classes)
    names: list[str] = []
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in names)
        if name and type(part).__name__ in class_names and not inside and any(True for _ in part.parameters()):
            names.append(name)
    instances = Counter(type(module.get_submodule(name)).__name__ for name in names)
    return [name for name in names if instances[type(module.get_submodule(name)).__name__] >= least]


def _longest_list(module: nn.Module) -> list[str]:
    best: list[str] = []
    most = 0
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or len(part) < 2 or len({type(element) for element in part}) > 1:
            continue
        size = sum(parameter.numel() for parameter in part.parameters())
        if size > most:
            most = size
            best = [f"{path}.{index}" if path else str(index) for index in range(len(part))]
    return best


def _separate(module: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """Yields the blocks that share no parameter with each other or with the rest of ``module``."""
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    for name in names:
        block = module.get_submodule(name)
        block_uses = Counter(id(parameter) for _, parameter in block.named_parameters(remove_duplicate=False))
        if all(uses[key] == count for key, count in block_uses.items()):
            yield name


def replace_block(module: nn.Module, name: str, block: nn.Module) -> None:
    """Puts ``block`` in the place of the submodule ``name``."""
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._modules[last] = block

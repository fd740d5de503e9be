"""Gives any ``nn.Module`` with a loss the forward interface of a ``Model``, and finds its blocks.

A wrapped module has no stem, layers and head, so it trains only with the data-parallel strategies. Its blocks are its
repeated parts, which are sharded, recomputed and compiled separately. Its constructor, or a hook, may put parts into
evaluation mode, such as a frozen backbone with batch statistics, or a network for a perceptual loss.
``nn.Module.train`` would switch them to training, so this module switches and restores modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpc_train.data.dataset import Ragged
from hpc_train.data.device_copy import DOCUMENT_ENDS
from hpc_train.errors import UserError
from hpc_train.models.model import Model, Observe
from hpc_train.models.own_loss import Gather, Loss, alone, call_loss, mixes_samples
from hpc_train.models.transformer import count_correct, cross_entropy, squared_error


class WrappedModel(nn.Module):
    """Runs ``module(inputs)`` and sums its loss.

    The wrapper shares the dicts of parameters, buffers and children of the module instead of holding it as a child, so
    names have no prefix and checkpoints load into the bare module.

    Args:
        module: the module to train. If it has a method ``loss(outputs, targets) -> (sum, count)``, this method replaces
            ``loss``. See ``Head.loss`` for its results; the count may also be a plain number. ``outputs`` is the result
            of the module. A loss that compares samples has a third parameter, ``gather``.
        loss: ``cross_entropy`` (int64 targets) or ``mse`` (targets of any dtype in the shape of the outputs). If the
            outputs have an attribute ``logits``, as in transformers, the loss uses it.
        wrap: the class names of the blocks; see ``find_blocks``.
        class_dim: the dim of the outputs that holds the classes of ``cross_entropy``: ``second``, ``last``, or the one
            that fits the targets (``auto``).

    Attributes:
        gather: the third argument of a loss that compares samples; the engine sets it.

    Raises:
        UserError: a class of ``wrap`` is unknown, or a parameter has no shape yet.
    """

    gather: Gather = staticmethod(alone)
    observe: Observe | None = None  # see ``Head``
    tied: Mapping[str, str] = {}
    saves_frozen: bool = True  # see ``Model``
    balances_experts: bool = False  # whether the loss has a load-balancing term, which depends on the split of a batch

    def __init__(
        self, module: nn.Module, loss: str, wrap: Sequence[str] | None = None, class_dim: str = "auto"
    ) -> None:
        super().__init__()
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(value):
                kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
                raise UserError(
                    f"{name} of {kind} has no shape before the first forward pass, but the model is split, counted "
                    "and given to the optimizer before that",
                    where=f"model, {name}",
                    fix=f"{kind.removeprefix('Lazy')} with its input size, or call the model once with an example at "
                    "the end of its constructor",
                )
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self._module = (module,)  # in a tuple, so that it is not registered as a child
        self.block_names = find_blocks(module, wrap)
        # models of transformers cache keys and values, but recomputation would add them a second time
        for part in module.modules():
            config: Any = getattr(part, "config", None)
            if hasattr(part, "base_model_prefix") and getattr(config, "use_cache", False):
                config.use_cache = False
        loss_method = getattr(module, "loss", None)
        self.own_count = callable(loss_method)  # see ``Head.own_count``; the built-in losses count the targets
        self.loss: Loss = loss_method if callable(loss_method) else _LOSSES[loss]
        self.mixes_samples = mixes_samples(self.loss)
        self._classifies = not callable(loss_method) and loss == "cross_entropy"
        self._class_dim = class_dim

    @property
    def bare(self) -> nn.Module:
        return self._module[0]

    def train(self, mode: bool = True) -> WrappedModel:
        """Calls ``train`` of the module, which may keep some of its parts in evaluation mode."""
        self._module[0].train(mode)
        self.training = mode
        return self

    def forward(
        self, inputs: Tensor, context: Mapping[str, Tensor], targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor | None]:
        """Runs the module like ``Model.forward`` with all parts; ``context`` becomes keyword arguments."""
        if isinstance(inputs, Ragged):
            if not self.own_count:
                raise UserError(
                    f"data.collate returns Ragged, but {type(self._module[0]).__name__} has no method loss, and the "
                    "losses of hpc_train need one row per item",
                    where="data.collate, model",
                    fix="give the model a method loss(outputs, targets) -> (sum, count)",
                )
            outputs = self._module[0](inputs.inputs)
            if targets is None:
                return outputs
            total, count = call_loss(self.loss, self.mixes_samples, outputs, inputs.targets, self.gather)
            if inputs.items == 0:  # all ranks run the same passes, so this rank ran on an item of another rank
                total = 0 * total
                count = 0 * count
            if self.training:
                return total, count
            if self.observe is not None and inputs.items:
                self.observe(outputs, inputs.targets)
            return total, count, None
        outputs = self._module[0](inputs, **self._arguments(context))
        if isinstance(outputs, Mapping) and "logits" in outputs and (self._classifies or targets is None):
            outputs = outputs["logits"]
        if targets is None:
            return outputs
        if not self.own_count and not isinstance(outputs, Tensor):
            outcome = "None" if outputs is None else f"a {type(outputs).__name__}"
            raise UserError(
                f"{type(self._module[0]).__name__}.forward returned {outcome}, but the losses of model.loss need a "
                "tensor",
                where="model._target_",
                fix="return the outputs alone, or give the model a method loss(outputs, targets) -> (sum, count)",
            )
        if self._classifies:
            outputs = _classes_last(outputs, targets, self._class_dim)
        total, count = call_loss(self.loss, self.mixes_samples, outputs, targets, self.gather)
        if self.training:
            return total, count
        if self.observe is not None:
            self.observe(outputs, targets)
        return (total, count, count_correct(outputs, targets) if self._classifies else None)

    def _arguments(self, context: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the keyword arguments of the module for ``context``, in the names of transformers for its models.

        Models of transformers separate documents where the positions begin again, if their attention is causal.
        """
        names = dict.fromkeys(context)
        names.pop(DOCUMENT_ENDS, None)
        if not hasattr(self._module[0], "base_model_prefix"):
            return {name: context[name] for name in names}
        if "document_ids" in names:
            is_causal = any(getattr(part, "is_causal", False) for part in self._module[0].modules())
            if "positions" not in names or not is_causal:
                raise UserError(
                    f"{type(self._module[0]).__name__} cannot limit attention to the documents of a packed sequence",
                    where="data.packing",
                    fix="data.packing=false",
                )
        names.pop("document_ids", None)
        return {"position_ids" if name == "positions" else name: context[name] for name in names}


def _classes_last(outputs: Tensor, targets: Tensor, class_dim: str) -> Tensor:
    """Returns logits with the classes in the last dim, from ``[micro, classes, ...]`` or ``[micro, ..., classes]``;
    raises UserError if ``class_dim`` does not fit the targets, or it is ``auto`` and both dims fit, as in a language
    model whose sequences are as long as its vocabulary is large."""
    fits = {
        "second": outputs.shape[:1] + outputs.shape[2:] == targets.shape,
        "last": outputs.shape[:-1] == targets.shape,
    }
    chosen = [dim for dim in fits if fits[dim] and class_dim in (dim, "auto")]
    if not chosen:
        raise UserError(
            f"outputs of shape {tuple(outputs.shape)} do not match targets of shape {tuple(targets.shape)}",
            where="model.loss",
            fix="return [micro, classes, ...] or [micro, ..., classes] from the model, or set model.loss=mse",
        )
    if len(chosen) > 1 and outputs.ndim > 2:
        raise UserError(
            f"outputs of shape {tuple(outputs.shape)} can have their classes in the second or in the last dim",
            where="model.class_dim",
            fix="model.class_dim=last if the model returns [micro, ..., classes], as language models do; "
            "model.class_dim=second if it returns [micro, classes, ...]",
        )
    if chosen == ["second"]:
        return outputs.movedim(1, -1)
    return outputs


def _mse(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if outputs.shape != targets.shape:
        raise UserError(
            f"the outputs have shape {tuple(outputs.shape)}, but the targets have shape {tuple(targets.shape)}",
            where="model.loss",
            fix="return outputs in the shape of the targets, as mse requires",
        )
    return squared_error(outputs, targets)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a ``Model`` or the blocks of a ``WrappedModel``, in order."""
    if isinstance(model, WrappedModel):
        return [model.get_submodule(name) for name in model.block_names]
    if isinstance(model, Model):
        return [*model.layers.values()]
    return []


_LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": _mse}


def find_blocks(module: nn.Module, wrap: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of the blocks within ``module``, in order; a block is never inside another one.

    Blocks are the modules of the classes ``wrap``. Without ``wrap``, they are the modules of the classes in
    ``_no_split_modules`` (an attribute of models of transformers) if these are repeated, else the elements of the
    ModuleList with the most parameters whose elements have the same class. Containers, which are not called, are
    replaced by the modules in them: a list of lists ``[attention, feed_forward]`` gives two blocks per element. A block
    that shares a parameter with the rest of the module is left out, since both need it at the same time. Raises
    UserError if no module has a class of ``wrap``.
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
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._modules[last] = block


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of ``model``. For a ``WrappedModel``, they include the bare module."""
    bare = [model.bare] if isinstance(model, WrappedModel) else []
    return [*model.modules(), *bare]


def begin_training(model: nn.Module) -> None:
    """Switches ``model`` to training. Parts that its constructor put into evaluation mode stay in this mode.

    If the entire model is in evaluation mode, as after ``from_pretrained``, all of it is switched to training.
    """
    modes = [(module, module.training) for module in all_modules(model)]
    top = model.bare if isinstance(model, WrappedModel) else model
    trains = top.training
    model.train()
    if trains:
        _restore(modes)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches ``model`` to evaluation mode in this context, and every part back to its mode at the end."""
    modes = [(module, module.training) for module in all_modules(model)]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)  # a module may override it, to do more than set an attribute
        _restore(modes)


def parts_in_evaluation(model: nn.Module) -> list[str]:
    """Returns the outermost parts in evaluation mode of a model that trains."""
    parts: list[str] = []
    for name, module in model.named_modules():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in parts):
            parts.append(name)
    return parts


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training

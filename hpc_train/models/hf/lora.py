"""Trains low-rank adapters next to the frozen weights of a transformers model, with the layers of ``peft``.

LoRA (Hu et al. 2021, arXiv:2106.09685) adds ``alpha / rank * B A x`` to the output of a linear layer. ``A`` is random
and ``B`` is zero, so that training begins with the function of the base model. Checkpoints contain only the trained
parameters and the identity of the base model, whose weights are read again from its files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.config.hf_config import CONFIG
from hpc_train.config.schema import HFModelConfig
from hpc_train.errors import UserError
from hpc_train.models.batch_norm import has_batch_statistics
from hpc_train.models.hf.nf4 import GROUP, NF4Linear, pack, pairs_of_levels
from hpc_train.models.hf.pretrained import FirstValues, WeightFiles, skeleton, weights_folder
from hpc_train.models.model import aliases

_ADAPTER = (".lora_A.default.", ".lora_B.default.")
_PACKED = ".packed"  # the end of the name of a weight in four bits
_BASE = ".base_layer."  # peft's name of the layer to which an adapter is added
_TASKS = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS"}  # names in peft; other tasks have none


class AdapterValues(FirstValues):
    """The initial values of a model with adapters: the weights of the base model, and peft's values for the
    adapters."""

    def read(self, name: str, begin: tuple[int, ...], size: tuple[int, ...]) -> Tensor | None:
        if _is_adapter(name):
            return None
        if name.endswith(_PACKED):
            return self._read_packed(base_name(name), begin[0], size[0])
        return super().read(base_name(name), begin, size)

    def _read_packed(self, name: str, begin: int, size: int) -> Tensor | None:
        """Returns ``size`` rows of the packed matrix ``name`` from ``begin``; of the files it reads only the rows of
        the matrix in which these weights are."""
        shape = self._skeleton.get_parameter(name).shape
        width = shape[1]
        first = begin * GROUP
        last = min(first + size * GROUP, shape.numel())
        above = first // width
        rows = super().read(name, (above, 0), (math.ceil(last / width) - above, width))
        if rows is None:
            return None
        return pack(rows.flatten()[first - above * width : last - above * width])

    def fill(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        if name.endswith(_PACKED):
            packed = self.read(name, (0,) * value.ndim, tuple(value.shape))
            if packed is None:
                packed = pack(self._drawn(base_name(name), generator.initial_seed()).flatten())
            value.copy_(packed)
        elif not _is_adapter(name):
            super().fill(base_name(name), value, generator)
        elif _ADAPTER[0] in name:
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        else:
            value.zero_()

    def fill_buffers(self, module: nn.Module, path: str, device: torch.device) -> None:
        for part in module.modules():
            if isinstance(part, NF4Linear):
                part.pairs = pairs_of_levels(device)
        super().fill_buffers(module, path, device)


def base_name(name: str) -> str:
    """Returns the name in the base model of the fixed parameter ``name``."""
    return name.replace(_BASE, ".").removesuffix(_PACKED) + ".weight" * name.endswith(_PACKED)


def _is_adapter(name: str) -> bool:
    return any(part in name for part in _ADAPTER)


def adapt(module: Any, config: HFModelConfig, tied: Mapping[str, str]) -> None:
    """Adds the adapters of ``config.lora`` to ``module`` in place and freezes all other parameters that do not train.

    ``module``, a model of transformers, is on ``meta``. ``tied`` maps the aliases of tied parameters to their names.
    Raises UserError if a layer does not exist or cannot have an adapter, or the model has batch statistics.

    A router, and the experts that transformers stacks in one parameter, cannot have adapters: those of peft multiply
    the matrices of all experts in each pass.
    """
    from peft import inject_adapter_in_model

    if has_batch_statistics(module):
        raise UserError(
            "the batch statistics of the model change in training, but an adapter does not contain them",
            where="model.lora.rank",
            fix="model.lora.rank=null, which trains the full model",
        )
    saved = _saved_modules(module, config)
    linear = _names_of_linear_layers(module)
    has_experts = any(parameter.ndim == 3 and len(parameter) > 1 for parameter in module.parameters())
    if has_experts:  # peft ignores a target that is not found if it finds another
        for target in config.lora.targets or ():
            if not any(f".{name}".endswith(f".{target}") for name in linear):
                raise _not_linear(target, _linear_layers(module))
    try:
        inject_adapter_in_model(_peft_config(module, config), module, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(f"peft cannot add adapters: {error}", where="model.lora.targets", fix=_TARGETS) from error
    for name in saved:
        module.get_submodule(name).requires_grad_(True)
    adapted = {name.partition(".lora_")[0] for name, _ in module.named_parameters() if _is_adapter(name)}
    others = sorted(adapted.difference(linear))
    if has_experts and others:  # whose parts have the names of linear layers in files
        raise _not_linear(others[0], adapted.intersection(linear))
    shared = {*tied, *tied.values()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and "lora_embedding_" in name:
            what = f"{name.partition('.lora_')[0]} is an embedding"
        elif (parameter.requires_grad or _BASE in name) and name.replace(_BASE, ".") in shared:
            what = f"{name.replace(_BASE, '.')} is shared by two layers"
        else:
            continue
        raise UserError(
            f"{what}, but adapters are only supported for linear layers that own their weight",
            where="model.lora.targets, model.lora.modules_to_save",
            fix=_TARGETS,
        )
    if config.lora.base == "nf4":
        _quantize(module, shared)


def _quantize(module: Any, shared: Collection[str]) -> None:
    """Replaces the linear layers of the body that do not train, whether they have adapters or not.

    The experts that transformers stacks in one parameter, and the layers of GPT-2, whose weights are transposed, keep
    the compute dtype. Raises UserError if no layer can be replaced.
    """
    quantized = 0
    for name, layer in [*module.named_modules()]:
        in_body = name.startswith(f"{module.base_model_prefix}.") and f"{name.replace(_BASE, '.')}.weight" not in shared
        if in_body and type(layer) is nn.Linear and not layer.weight.requires_grad:
            module.set_submodule(name, NF4Linear(layer))
            quantized += 1
    if not quantized:
        raise UserError(
            f"{type(module).__name__} has no frozen torch.nn.Linear whose weights model.lora.base=nf4 can hold",
            where="model.lora.base",
            fix="model.lora.base=compute",
        )


def _not_linear(name: str, linear: Iterable[str]) -> UserError:
    ends = {other.rpartition(".")[2] for other in linear}
    return UserError(
        f"{name} is not a linear layer of this model; its routers and experts cannot have adapters",
        where="model.lora.targets",
        fix=f"model.lora.targets=[{','.join(sorted(ends))}], or some of these",
    )


_TARGETS = "the names of linear layers, or model.lora.targets=null for all of them"


def _saved_modules(module: Any, config: HFModelConfig) -> list[str]:
    """Returns the names of the modules that train in full."""
    named = config.lora.modules_to_save
    if named is None:
        body = module.base_model_prefix
        head = {name.partition(".")[0] for name, _ in module.named_parameters()} - {body}
        if config.task.endswith("_classification"):
            return sorted(head)
        return []
    names = [name for name, _ in module.named_modules() if name]
    unknown = [name for name in named if name not in names]
    if unknown:
        raise UserError(
            f"the model has no module {unknown[0]}",
            where="model.lora.modules_to_save",
            fix=f"full names, such as {names[-1]}",
        )
    return list(named)


def _peft_config(module: Any, config: HFModelConfig) -> Any:
    from peft import LoraConfig

    lora = config.lora
    alpha: Any = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha  # peft computes with either
    assert lora.rank is not None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        lora_dropout=lora.dropout,
        target_modules=_linear_layers(module) if lora.targets is None else list(lora.targets),
        task_type=_TASKS.get(config.task),
        base_model_name_or_path=config.name_or_path,
        revision=config.revision,
    )


def _linear_layers(module: Any) -> list[str]:
    """Returns the linear layers of the body by the last parts of their names, or by their full names if other modules
    have the same last parts."""
    body = f"{module.base_model_prefix}."
    names = [name for name in _names_of_linear_layers(module) if name.startswith(body)]
    ends = {name.rpartition(".")[2] for name in names}
    meant = {name for name, _ in module.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == set(names) else names)


def _names_of_linear_layers(module: Any) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear | Conv1D)]


def exported_name(name: str) -> str:
    """Returns the name in peft's files of the parameter that transformers calls ``name``."""
    for part in _ADAPTER:
        name = name.replace(part, part.replace("default.", ""))
    return f"base_model.model.{name}"


def exported_config(config: HFModelConfig) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    module = skeleton(config)
    adapter_config = _peft_config(module, config)
    adapter_config.modules_to_save = _saved_modules(module, config) or None
    adapter_config.inference_mode = True
    return {key: sorted(value) if isinstance(value, set) else value for key, value in adapter_config.to_dict().items()}


class MergedWeights:
    """Merges adapters into the weight files of their base model.

    The sum of weight and adapter is computed in fp32 and rounded once. The weights that the run held in NF4 are
    rounded to NF4 first, since the adapters were trained with the rounded weights.

    Args:
        trained: the names in transformers of the parameters that train.
        read: returns one of these parameters.
        dtype: the dtype of the weights; None keeps the dtype of each tensor in the files.

    Raises:
        UserError: the files contain a changed weight only as a part of another tensor.
    """

    def __init__(
        self, config: HFModelConfig, trained: Iterable[str], read: Callable[[str], Tensor], dtype: torch.dtype | None
    ) -> None:
        from transformers.pytorch_utils import Conv1D

        module = skeleton(config)
        module.tie_weights()
        self._transposed = {name for name, part in module.named_modules() if isinstance(part, Conv1D)}
        self._files = WeightFiles(weights_folder(config), module)
        with torch.device("meta"):
            adapt(module, config, aliases(module.named_parameters(remove_duplicate=False)))
        self._alpha = config.lora.alpha
        self._read = read
        self._dtype = dtype
        self._layers: dict[str, str] = {}  # stored tensor -> the layer with the adapter
        self._replaced: dict[str, str] = {}  # stored or new tensor -> the parameter that trains
        for name in trained:
            layer, is_adapter, _ = name.partition(_ADAPTER[0])
            if is_adapter:
                self._layers[self._stored_name(f"{layer}.weight")] = layer
            elif not _is_adapter(name):
                self._replaced[self._stored_name(name)] = name
        self._quantized = {
            self._stored_name(base_name(f"{name}{_PACKED}")): part
            for name, part in module.named_modules()
            if isinstance(part, NF4Linear)
        }

    def _stored_name(self, name: str) -> str:
        return self._files.stored_name(name) or name

    def files(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yields the name and the tensors of each file; the last also gets those that the base model lacks."""
        missing = {*self._replaced}
        *_, last = self._files.by_file
        for file, names in self._files.by_file.items():
            missing -= {*names}
            yield file, {name: self._tensor(name) for name in (*names, *(missing if file == last else ()))}

    def _tensor(self, stored: str) -> Tensor:
        if stored in self._replaced:
            weight = self._read(self._replaced[stored])
        else:
            weight = self._files.stored_whole(stored)
        dtype = weight.dtype
        if self._dtype is not None and weight.is_floating_point():
            dtype = self._dtype
        if stored in self._quantized:
            weight = self._quantized[stored].rounded(weight)
        if stored in self._layers:
            layer = self._layers[stored]
            down, up = (self._read(f"{layer}{part}weight").float() for part in _ADAPTER)
            product = up @ down
            if layer in self._transposed:
                product = product.t()
            weight = weight.float() + self._alpha / len(down) * product
        return weight.to(dtype).contiguous()


def base_identity(model: Any) -> dict[str, Any] | None:
    """Returns the identity of the files of the frozen weights of ``model``, the config of any model; None without
    adapters.

    It consists of the SHA-256 of config.json and the sizes in bytes of the weight files, which are not read.
    """
    if not isinstance(model, HFModelConfig) or model.lora.rank is None:
        return None
    folder: Path = weights_folder(model)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
    identity: dict[str, Any] = {CONFIG: hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(), **sizes}
    if model.lora.base != "compute":
        identity["model.lora.base"] = model.lora.base
    return identity


def check_base(model: Any, extra: Mapping[str, Any], where: str) -> None:
    """Compares the base model with the base model of a checkpoint whose manifest has the values ``extra``. Raises
    UserError if its files have changed since the checkpoint was saved."""
    current = base_identity(model)
    expected = extra.get(BASE)
    if current is None or expected is None or current == expected:
        return
    changed = sorted(name for name in {*current, *expected} if current.get(name) != expected.get(name))
    raise UserError(
        f"the adapter of the checkpoint was trained on another base model: {', '.join(changed)} of "
        f"{model.name_or_path} changed since",
        where=f"model.name_or_path, {where}",
        fix="restore the files of the base model and model.lora.base, or start with another run.name",
    )


BASE = "base_model"  # the key of the identity in the manifest of a checkpoint

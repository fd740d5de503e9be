"""Compares a model with the description of its family.

``python -m hpc_train.models.contract`` reads the configs of model and data as JSON from standard input and prints the
first difference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, PrepareModuleOutput

from hpc_train.config.extensions import ModelFamily, from_plain, load_family, load_source
from hpc_train.config.import_path import locate
from hpc_train.errors import UserError
from hpc_train.layout.counted import sample_shape
from hpc_train.models.build import build_model
from hpc_train.models.model import Model


def disagreement(model_config: Any, data_config: Any) -> str:
    """Returns the first difference between the model and its description; an empty string if they agree. Raises
    UserError if the model cannot be built."""
    family = load_family(model_config.kind)
    model = build_model(model_config, 0)
    assert isinstance(model, Model)
    names = dict(model.named_parameters())
    count = sum(parameter.numel() for parameter in names.values())
    if family.parameters is not None and family.parameters(model_config) != count:
        return f"parameters is {family.parameters(model_config)}, but the model has {count} parameters"
    if len(model.layers) != model_config.n_layers:
        return f"n_layers is {model_config.n_layers}, but the model has {len(model.layers)} layers"
    if family.hugging_face is not None:
        for name in names:
            stored_name = None
            with suppress(LookupError):
                stored_name = family.hugging_face.parameter_name(model_config, name)
            if not stored_name:
                return f"hugging_face.parameter_name has no name for {name}"
    return _plan_problem(family, model) or _flops_problem(family, model, model_config, data_config)


def _plan_problem(family: ModelFamily, model: Model) -> str:
    if family.tensor_parallel is None:
        return ""
    plan = locate(family.tensor_parallel.plan, "model.kind")(model)
    modules = {name for name, _ in model.named_modules()}
    for name, style in plan.items():
        if name not in modules:
            return f"the tensor-parallel plan names the module {name}, which the model does not have"
        if not isinstance(style, ParallelStyle):
            return f"the tensor-parallel plan gives {name} a {type(style).__name__}, not a ParallelStyle"
    omitted = [name for name, _ in model.named_parameters() if not _is_planned(name, plan)]
    if family.tensor_parallel.shards_sequence and omitted:
        return f"the tensor-parallel plan shards the sequence, but it omits {omitted[0]}"
    return ""


def _is_planned(parameter: str, plan: Mapping[str, ParallelStyle]) -> bool:
    """Returns whether ``plan`` has a style for the module of ``parameter`` or for a module that contains it."""
    above = accumulate(parameter.split(".")[:-1], lambda name, part: f"{name}.{part}")
    styles = (plan[name] for name in above if name in plan)
    return any(not isinstance(style, PrepareModuleInput | PrepareModuleOutput) for style in styles)


def _flops_problem(family: ModelFamily, model: Model, model_config: Any, data_config: Any) -> str:
    shape = sample_shape(data_config)
    if family.flops_per_sample is None or not shape:
        return ""
    stated = family.flops_per_sample(model_config, shape)
    if stated is None:
        return ""
    counted = model.flops_per_sample(torch.empty((1, *shape), device="meta"))
    if abs(stated - counted) > 1e-6 * max(stated, counted):
        return f"flops_per_sample is {stated:g} in the description and {counted:g} in the model"
    return ""


def main() -> None:
    given = json.load(sys.stdin)
    model = given["model"]
    data = given["data"]
    try:
        model_config: Any = from_plain(load_family(model["kind"]).schema, model)
        data_config: Any = from_plain(load_source(data["kind"]).schema, data)
        print(disagreement(model_config, data_config))
    except UserError as error:
        print(error.what)


if __name__ == "__main__":
    main()

"""Composes the config of a generation, and checks that the run has a language model and that the prompts fit it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace

from hpc_train.config import hf_config
from hpc_train.config.extensions import IMAGES, family_of
from hpc_train.config.schema import Config, HFModelConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import workers_per_node
from hpc_train.tasks.evaluate.config import evaluation_config

_GROUPS = (*(field.name for field in fields(Config)), "experiment")


def is_override(word: str) -> bool:
    """Returns whether a word of the command line is an override of the config, and not a prompt."""
    key, equals, _ = word.lstrip("+~").partition("=")
    return bool(equals or re.fullmatch(r"~[\w./@]+", word)) and re.split("[./@]", key)[0] in _GROUPS


def generation_config(run: Config, overrides: Sequence[str]) -> Config:
    """Returns the config under which a checkpoint of ``run`` generates: on one worker, or under the strategy that the
    overrides choose on all workers of this machine.

    Raises:
        UserError: the overrides are invalid, the model is not a language model, or a pipeline would split it.
    """
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    one = not any(key.partition(".")[0] == "strategy" for key in keys)
    config = evaluation_config(run, ["+strategy=single", *overrides] if one else overrides)
    _check_language_model(config)
    if config.strategy.pp != 1:
        raise UserError(
            "generate needs the outputs of the whole model for each token, but a pipeline splits it into stages",
            where="strategy.pp",
            fix="+strategy=zero3 or +strategy=tp, which shard the model over all workers",
        )
    if one and not any(key in ("cluster.gpus_per_node", "cluster.cpu_workers") for key in keys):
        gpus = min(1, workers_per_node(config.cluster)[0])
        config = replace(config, cluster=replace(config.cluster, gpus_per_node=gpus, cpu_workers=1))
    # one row at a time is computed, whose length grows: neither a batch nor compiled code of one shape is of use
    strategy, train = replace(config.strategy, async_tp=False), replace(config.train, compile=False)
    return replace(config, strategy=strategy, train=train, metrics={}, eval_sets={})


def _check_language_model(config: Config) -> None:
    model, data = config.model, config.data
    images = hasattr(data, "image_size") and (data.kind != "synthetic" or getattr(data, "task", None) == IMAGES)
    task = model.task if isinstance(model, HFModelConfig) else "causal_lm"
    if images or family_of(model).learns_from == IMAGES or task != "causal_lm":
        what = f"model.task={task}" if task != "causal_lm" else f"model={model.kind} with data={data.kind}"
        raise UserError(
            f"generate continues text, but the run trains {what}",
            where="RUN",
            fix="a run of a language model: model=gpt, model=hf with model.task=causal_lm, or your own",
        )


def check_prompts(config: Config, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Checks that the model can continue each prompt by ``max_tokens`` tokens.

    Args:
        prompts: token ids.

    Raises:
        UserError: a prompt is empty, has unknown token ids, or is too long for the model together with ``max_tokens``.
    """
    if max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}, but must be at least 1", where="--max-tokens", fix="32")
    vocabulary, longest = _vocabulary(config), _positions(config)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens", where="PROMPT", fix="a prompt of at least one token")
        if vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise UserError(
                f"prompt {number} has the token id {wrong}, but the model has {vocabulary} token ids",
                where="PROMPT, --tokenizer",
                fix="the tokenizer with which the data of the run was prepared",
            )
        if longest is not None and len(prompt) + max_tokens > longest:
            raise _too_long(number, len(prompt), max_tokens, longest, isinstance(config.model, HFModelConfig))


def _too_long(number: int, tokens: int, new: int, longest: int, of_model: bool) -> UserError:
    limit = f"the model has {longest} positions" if of_model else f"the model was trained on {longest} at a time"
    room = longest - tokens
    more = "" if of_model else ", or data.sequence_length=N to go beyond what was trained"
    shorter = f"--max-tokens {room}" if room > 0 else f"a prompt of fewer than {longest} tokens"
    return UserError(
        f"prompt {number} has {tokens} tokens, to which up to {new} are added, but {limit}",
        where="PROMPT, --max-tokens",
        fix=f"{shorter}{more}",
    )


def _vocabulary(config: Config) -> int | None:
    if isinstance(config.model, HFModelConfig):
        return hf_config.number(_values(config.model), "vocab_size")
    known: int | None = getattr(config.model, "vocab_size", None) or getattr(config.data, "vocab_size", None)
    return known


def _positions(config: Config) -> int | None:
    """Returns the longest sequence: the positions of a published model, or the length of the training sequences."""
    if isinstance(config.model, HFModelConfig):
        values = _values(config.model)
        found = hf_config.number(values, "max_position_embeddings") or hf_config.number(values, "n_positions")
        if found is not None:
            return found
    length: int | None = getattr(config.data, "sequence_length", None)
    return length


def _values(model: HFModelConfig) -> dict[str, object] | None:
    found = hf_config.read(model.name_or_path, model.revision, model.config)
    return None if found is None else dict(found)

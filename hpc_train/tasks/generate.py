"""Continues prompts with a checkpoint of a language model, in workers of any layout without pipeline stages; imports
torch in the workers only."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hpc_train.bench.request import WorkerRequest, write_progress, write_result
from hpc_train.config import hf_config
from hpc_train.config.extensions import IMAGES, family_of
from hpc_train.config.schema import Config, HFModelConfig
from hpc_train.errors import UserError
from hpc_train.machine.allocation import workers_per_node
from hpc_train.run.agent_worker import Heartbeat, Phase, WorkerSpec
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import load
from hpc_train.run.requests import StopFlag
from hpc_train.tasks.evaluate import evaluation_config
from hpc_train.train.prompts import Sampling

_GROUPS = (*(field.name for field in fields(Config)), "experiment")
_SHOW_EVERY_S = 0.5  # how often the progress is written


def is_override(word: str) -> bool:
    """Returns whether a word of the command line is an override of the config, and not a prompt."""
    key, equals, _ = word.lstrip("+~").partition("=")
    return bool(equals or re.fullmatch(r"~[\w./@]+", word)) and re.split("[./@]", key)[0] in _GROUPS


def generation_config(run: Config, overrides: Sequence[str]) -> Config:
    """Returns the config under which a checkpoint of ``run`` generates: on one worker, or under the strategy that the
    overrides choose on all workers of this machine. Raises UserError if the overrides are invalid, the model is not a
    language model, or a pipeline would split it."""
    keys = [word.lstrip("+~").partition("=")[0] for word in overrides]
    on_one_worker = not any(key.partition(".")[0] == "strategy" for key in keys)
    if on_one_worker:
        overrides = ["+strategy=single", *overrides]
    config = evaluation_config(run, overrides)

    model = config.model
    data = config.data
    task = model.task if isinstance(model, HFModelConfig) else "causal_lm"
    images = hasattr(data, "image_size") and (data.kind != "synthetic" or getattr(data, "task", None) == IMAGES)
    if images or family_of(model).learns_from == IMAGES or task != "causal_lm":
        what = f"model={model.kind} with data={data.kind}"
        if task != "causal_lm":
            what = f"model.task={task}"
        raise UserError(
            f"generate continues text, but the run trains {what}",
            where="RUN",
            fix="a run of a language model: model=gpt, model=hf with model.task=causal_lm, or your own",
        )
    if config.strategy.pp != 1:
        raise UserError(
            "generate needs the outputs of the whole model for each token, but a pipeline splits it into stages",
            where="strategy.pp",
            fix="+strategy=zero3 or +strategy=tp, which shard the model over all workers",
        )

    if on_one_worker and not any(key in ("cluster.gpus_per_node", "cluster.cpu_workers") for key in keys):
        gpus = min(1, workers_per_node(config.cluster)[0])
        config = replace(config, cluster=replace(config.cluster, gpus_per_node=gpus, cpu_workers=1))
    # rows are computed one at a time and grow, so neither a batch nor code compiled for one shape helps
    strategy = replace(config.strategy, async_tp=False)
    return replace(config, strategy=strategy, train=replace(config.train, compile=False), metrics={}, eval_sets={})


def check_prompts(config: Config, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Checks that the model can continue each prompt by ``max_tokens`` tokens. ``prompts`` are token ids. Raises
    UserError if a prompt is empty, has unknown token ids, or is too long for the model together with ``max_tokens``."""
    if max_tokens < 1:
        raise UserError(f"--max-tokens is {max_tokens}, but must be at least 1", where="--max-tokens", fix="32")
    model = config.model
    data = config.data
    positions = None  # the positions of a published model
    if isinstance(model, HFModelConfig):
        values = hf_config.read(model.name_or_path, model.revision, model.config)
        vocabulary = hf_config.number(values, "vocab_size")
        positions = hf_config.number(values, "max_position_embeddings") or hf_config.number(values, "n_positions")
    else:
        vocabulary = getattr(model, "vocab_size", None) or getattr(data, "vocab_size", None)
    longest = positions if positions is not None else getattr(data, "sequence_length", None)

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
            fix = f"a prompt of fewer than {longest} tokens"
            if len(prompt) < longest:
                fix = f"--max-tokens {longest - len(prompt)}"
            if isinstance(model, HFModelConfig):
                limit = f"the model has {longest} positions"
            else:
                limit = f"the model was trained on {longest} at a time"
                fix += ", or data.sequence_length=N to go beyond what was trained"
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, to which up to {max_tokens} are added, but {limit}",
                where="PROMPT, --max-tokens",
                fix=fix,
            )


@dataclass(frozen=True)
class GenerationRequest(WorkerRequest):
    """Requests up to ``max_tokens`` new tokens for each prompt, by the checkpoint of ``step``.

    Attributes:
        weights: the name of a hook whose weights to use, such as ema; None uses those of the model.
        prompts: token ids.
        ends: the tokens after which a text is complete.
    """

    checkpoint: str
    step: int
    weights: str | None
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    sampling: Sampling
    ends: Sequence[int]


def generate_tokens(spec: WorkerSpec, stop: StopFlag) -> Exit:
    """Generates the texts of the request as rank ``spec.rank``; rank 0 writes the result. Raises UserError if the
    checkpoint is damaged, does not fit the model or has no weights of the hook, or the outputs of the model are not
    logits."""
    from hpc_train.checkpoint.restoring import load_weights, open_weights
    from hpc_train.checkpoint.store import Checkpoint
    from hpc_train.models.hf.lora import check_base
    from hpc_train.parallel.build import build_engine
    from hpc_train.train.decoding import Decoder
    from hpc_train.train.processes import answer_requests, join, leave
    from hpc_train.train.step import Control

    run = RunDirectory(Path(spec.run_dir))
    config = load(run)
    request = GenerationRequest.read(run)
    heartbeat = Heartbeat.of(spec.heartbeat)
    answer_requests(spec)
    mesh = join(spec, config)
    source = open_weights(Checkpoint(request.step, Path(request.checkpoint)), mesh)
    manifest = source.manifest
    check_base(config.model, manifest.extra, request.checkpoint)
    engine = build_engine(config, mesh, restored=source.parameters)
    load_weights(source, engine, mesh, request.weights)
    control = Control(mesh)
    began = time.monotonic()
    shown = 0.0

    def proceed(done: int) -> bool:
        nonlocal shown
        heartbeat.enter(Phase.EVALUATION, request.step)
        if mesh.rank == 0 and time.monotonic() - shown > _SHOW_EVERY_S:
            shown = time.monotonic()
            write_progress(run, done - 1, request.max_tokens)
        control.post(stop.requested, 0)
        return not control.read().stop

    heartbeat.enter(Phase.EVALUATION, request.step)
    tokens = Decoder(engine, mesh).run(request.prompts, request.max_tokens, request.sampling, request.ends, proceed)
    if tokens is not None and mesh.rank == 0:
        result = {
            "tokens": tokens,
            "precision": config.precision.name,
            "layout": str(mesh.layout),
            "device": mesh.device.type,
            "seconds": time.monotonic() - began,
        }
        write_result(run, result)
    leave(mesh)
    return Exit.STOPPED if tokens is None else Exit.DONE

"""The commands that use the model of a run: ``evaluate`` and ``generate``.

They load a checkpoint in the workers of a temporary run on this machine, on the nodes of a Slurm step, or in a job.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.bench.measuring import check_here, run_benchmark
from hpc_train.bench.request import WorkerRequest
from hpc_train.checkpoint.listing import NEWEST, choose_by_name, find_run
from hpc_train.checkpoint.store import Checkpoint
from hpc_train.config.evaluation import LOWEST_LOSS, best_metric
from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import default_root
from hpc_train.config.schema import Config
from hpc_train.errors import UserError
from hpc_train.launch.command_job import follow, submit, without_submission
from hpc_train.launch.request import register_launcher
from hpc_train.machine.allocation import current_allocation
from hpc_train.run.code import frozen_code
from hpc_train.run.directory import RunDirectory
from hpc_train.run.freeze import load
from hpc_train.run.owner import TRUST, output_directory
from hpc_train.run.snapshot import check_copy
from hpc_train.tasks.evaluate import EvaluationRequest, evaluation_config
from hpc_train.tasks.generate import GenerationRequest, check_prompts, generation_config, is_override
from hpc_train.train.prompts import Codec, Sampling, choose_tokenizer

EVALUATION = "hpc_train.tasks.evaluate:evaluate_checkpoint"
GENERATION = "hpc_train.tasks.generate:generate_tokens"


@dataclass(frozen=True)
class UsedCheckpoint:
    """Holds the run and the checkpoint that a command line selects."""

    run: RunDirectory
    config: Config
    checkpoint: Checkpoint
    options: argparse.Namespace

    @classmethod
    def select(cls, options: argparse.Namespace, command: str) -> UsedCheckpoint:
        """Returns the run and checkpoint in ``options`` for ``command``. Raises UserError if one of them does not
        exist."""
        register_launcher()
        run = find_run(options.run, Path(default_root()), command, options.trust_owner)
        config = load(run)
        metric = best_metric(config.checkpoint.keep_best, config.checkpoint.best_mode) or LOWEST_LOSS
        return cls(run, config, choose_by_name(run, options.checkpoint, metric), options)

    def submit(self, command: str, arguments: list[str]) -> int:
        """Runs ``command`` with ``arguments`` as a job, shows its output and returns its exit code."""
        words = [command, *without_submission(arguments)]
        extra = shlex.split(self.options.sbatch)
        gpus = self.config.cluster.gpus_per_node
        if gpus not in ("auto", 0):  # a job without GPUs uses the CPU
            extra.insert(0, f"--gpus-per-node={gpus}")
        return follow(submit(words, self.config, output_directory(self.run.path) / "logs" / "slurm", extra))

    def run_workers(self, config: Config, request: WorkerRequest, entry: str) -> tuple[int, dict[str, Any] | None]:
        """Runs workers with the entry function ``entry``; returns the exit code, and the result with the checkpoint.
        Raises UserError if ``config`` is invalid."""
        check_here(config)
        code = None
        if self.options.code == "run":
            check_copy(self.run)
            code = frozen_code(self.run)
        exit_code, result = run_benchmark(config, request, entry, code=code, trust_owner=self.options.trust_owner)
        if result is None:
            return exit_code, None
        return exit_code, {
            "run": str(self.run.path),
            "step": self.checkpoint.step,
            "checkpoint": str(self.checkpoint.path),
            **result,
        }


def _parser(command: str, usage: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Returns a parser with the run, and the options that all such commands have."""
    parser = OptionParser(
        prog=f"python -m hpc_train {command}",
        usage=f"python -m hpc_train {command} RUN {usage}",
        description=description,
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "--checkpoint",
        default=NEWEST,
        metavar="newest|best|STEP",
        help="best: by checkpoint.keep_best, or by val_loss without it (default: %(default)s)",
    )
    parser.add_argument(
        "--weights", metavar="HOOK", help="use the weights of this hook, such as ema, instead of those of the model"
    )
    parser.add_argument(
        "--code",
        choices=["run", "now"],
        default="run",
        help="import your modules from the frozen code of the run or the current directory (default: %(default)s)",
    )
    parser.add_argument(TRUST, action="store_true", help="use a run that belongs to another user")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--submit", action="store_true", help="run as a Slurm job on one node, with the run's cluster config"
    )
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="additional sbatch options for that job")
    return parser


def evaluate(arguments: list[str]) -> int:
    """Evaluates on this machine or the nodes of the Slurm step, prints the result and returns the exit code."""
    parser = _parser(
        "evaluate",
        "[overrides] [--checkpoint newest|best|STEP] [--weights HOOK] [--json]",
        "Evaluates a checkpoint. Overrides may change the data, the strategy, the batch and the precision of the run,"
        " but not its model.",
        [
            "python -m hpc_train evaluate mine",
            "python -m hpc_train evaluate mine --checkpoint best +strategy=dp",
            "python -m hpc_train evaluate mine data=tokens data.path=/data/other --json",
            "python -m hpc_train evaluate mine --submit --sbatch='--gpus-per-node=4 --time=0:30:00'",
            "srun --nodes=2 --ntasks-per-node=1 python -m hpc_train evaluate mine",
        ],
    )
    options, rest = parser.parse_known_args(arguments)
    used = UsedCheckpoint.select(options, "evaluate")
    config = evaluation_config(used.config, rest)
    if options.submit:
        return used.submit("evaluate", arguments)
    step = used.checkpoint.step
    if current_allocation().node_rank == 0:
        print(f"evaluating the checkpoint of step {step}", file=sys.stderr, flush=True)
    request = EvaluationRequest(str(used.checkpoint.path), step, options.weights)
    exit_code, result = used.run_workers(config, request, EVALUATION)
    if result is not None:
        print(json.dumps(result) if options.json else _report(result))
    return exit_code


def _report(result: dict[str, Any]) -> str:
    sizes = ", ".join(f"{count:,} samples ({name})" for name, count in result["samples"].items())
    rows = {
        "checkpoint": f"step {result['step']} in {result['checkpoint']}",
        **{name: f"{value:.6g}" for name, value in result["metrics"].items()},
        "data": f"{result['data']}: {sizes}",
        "layout": f"{result['layout']} on {result['device']}, {result['precision']}",
        "time": f"{result['seconds']:.1f} s",
    }
    return "\n".join(f"{name + ':':<14} {value}" for name, value in rows.items())


def generate(arguments: list[str]) -> int:
    """Generates on this machine, prints each prompt with its completion and returns the exit code."""
    parser = _parser(
        "generate",
        "PROMPT... [overrides] [--prompts FILE] [--max-tokens N] [--temperature T] [--top-k K] [--top-p P] [--seed S]",
        "Continues each prompt with a checkpoint of a language model, on one worker, or on all workers under a strategy"
        " such as +strategy=zero3.",
        [
            "python -m hpc_train generate mine 'def main('",
            "python -m hpc_train generate mine 'Once upon' 'The end' --max-tokens 100 --temperature 0.8 --top-p 0.95"
            " --seed 1",
            "python -m hpc_train generate mine --prompts prompts.txt --checkpoint best --weights ema --json",
            "python -m hpc_train generate mine --prompts prompts.txt +strategy=zero3 --submit"
            " --sbatch=--gpus-per-node=4",
        ],
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a file with a prompt on each line; the lines of a .jsonl file are JSON strings",
    )
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="new tokens per prompt (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the most likely token (%(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample only from the K most likely tokens")
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample only from the most likely tokens with total probability P",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of the sampling (%(default)s)")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE|bytes|ids",
        help="a tokenizer.json; ids reads and prints token ids (default: the tokenizer of the run's data or model)",
    )
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a directory with your own config groups")
    options, rest = parser.parse_known_args(arguments)
    overrides = [word for word in rest if is_override(word)]
    texts = _prompts([word for word in rest if not is_override(word)], options.prompts)
    if options.config_dir is not None:
        overrides += ["-cd", options.config_dir]
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    sampling.check()
    used = UsedCheckpoint.select(options, "generate")
    config = generation_config(used.config, overrides)
    tokenizer = choose_tokenizer(config, options.tokenizer)
    codec = tokenizer.open()
    prompts = [codec.encode(text) for text in texts]
    check_prompts(config, prompts, options.max_tokens)
    if options.submit:
        return used.submit("generate", arguments)
    request = GenerationRequest(
        str(used.checkpoint.path),
        used.checkpoint.step,
        options.weights,
        tuple(map(tuple, prompts)),
        options.max_tokens,
        sampling,
        tokenizer.ends,
    )
    exit_code, result = used.run_workers(config, request, GENERATION)
    if result is None:
        return exit_code
    rows = []
    for text, prompt, tokens in zip(texts, prompts, result.pop("tokens"), strict=True):
        completion = _completion(codec, prompt, tokens, tokenizer.ends)
        rows.append({"prompt": text, "completion": completion, "tokens": tokens})
    if options.json:
        print(json.dumps({**result, "completions": rows}))
        return exit_code
    print(f"\n{'-' * 8}\n".join(row["prompt"] + row["completion"] for row in rows))
    layout = f"{result['layout']} on {result['device']}, {result['precision']}"
    count = sum(len(row["tokens"]) for row in rows)
    print(f"step {result['step']}, {count} tokens in {result['seconds']:.1f} s, {layout}", file=sys.stderr)
    return exit_code


def _prompts(words: list[str], file: Path | None) -> list[str]:
    """Returns the prompts of the command line, and the prompts in ``file``. Raises UserError if there is none, a word
    looks like an option, or the file cannot be read."""
    unknown = [word for word in words if word.startswith("--")]
    if unknown:
        fix = "python -m hpc_train generate --help lists the options; --prompts FILE takes a prompt that starts with --"
        raise UserError(f"unknown option {unknown[0]}", where="the command line", fix=fix)
    prompts = [*words]
    if file is not None:
        prompts += _prompts_in(file)
    if not prompts:
        raise UserError("there is no prompt", where="the command line", fix="generate RUN 'a text', or --prompts FILE")
    return prompts


def _prompts_in(file: Path) -> list[str]:
    try:
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            prompts = [json.loads(line) for line in prompts]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}", where="--prompts", fix="a UTF-8 file of prompts") from error
    wrong = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if wrong:
        fix = 'a JSON string on each line, such as "def main("'
        raise UserError(f"{file} has {wrong[0]!r}, which is not a string", where="--prompts", fix=fix)
    return prompts


def _completion(codec: Codec, prompt: list[int], new: list[int], ends: Sequence[int]) -> str:
    """Returns the text that ``new`` adds, without an end token; its first word may depend on the prompt."""
    if new and new[-1] in ends:
        new = new[:-1]
    before = codec.decode(prompt)
    text = codec.decode([*prompt, *new])
    if text.startswith(before):
        return text.removeprefix(before)
    return codec.decode(new)

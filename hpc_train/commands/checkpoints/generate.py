"""``python -m hpc_train generate RUN PROMPT`` continues texts with a checkpoint of a language model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.commands.checkpoints.use_checkpoint import UsedCheckpoint, add_options
from hpc_train.errors import UserError
from hpc_train.tasks.generate import GenerationRequest, check_prompts, generation_config, is_override
from hpc_train.train.prompts import Codec, Sampling, choose_tokenizer

ENTRY = "hpc_train.tasks.generate:generate_tokens"
_EPILOG = """\
examples:
  python -m hpc_train generate mine 'def main('
  python -m hpc_train generate mine 'Once upon' 'The end' --max-tokens 100 --temperature 0.8 --top-p 0.95 --seed 1
  python -m hpc_train generate mine --prompts prompts.txt --checkpoint best --weights ema --json
  python -m hpc_train generate mine --prompts prompts.txt +strategy=zero3 --submit --sbatch=--gpus-per-node=4
"""


def main(arguments: list[str]) -> int:
    """Generates on this machine, prints each prompt with its completion and returns the exit code."""
    options, rest = _parser().parse_known_args(arguments)
    overrides = [word for word in rest if is_override(word)]
    texts = _prompts([word for word in rest if not is_override(word)], options.prompts)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    sampling.check()
    used = UsedCheckpoint.select(options, "generate")
    config = generation_config(used.config, _with_directory(overrides, options.config_dir))
    chosen = choose_tokenizer(config, options.tokenizer)
    codec = chosen.open()
    prompts = [codec.encode(text) for text in texts]
    check_prompts(config, prompts, options.max_tokens)
    if options.submit:
        return used.submit("generate", arguments)
    request = GenerationRequest(
        str(used.found.path),
        used.found.step,
        options.weights,
        tuple(map(tuple, prompts)),
        options.max_tokens,
        sampling,
        chosen.ends,
    )
    exit_code, result = used.run_workers(config, request, ENTRY)
    if result is not None:
        _show(result, texts, prompts, codec, chosen.ends, options.json)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train generate",
        usage="python -m hpc_train generate RUN PROMPT... [overrides] [--prompts FILE] [--max-tokens N]"
        " [--temperature T] [--top-k K] [--top-p P] [--seed S]",
        description="Continues each prompt with a checkpoint of a language model, on one worker, or on all workers"
        " under a strategy such as +strategy=zero3.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)
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
    parser.add_argument("--top-k", type=int, metavar="K", help="draw only from the K most likely tokens")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw only from the most likely tokens of total share P"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of the draws (%(default)s)")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE|bytes|ids",
        help="a tokenizer.json; ids reads and prints token ids (default: that of the run's data or model)",
    )
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a directory with your own config groups")
    return parser


def _with_directory(overrides: list[str], directory: str | None) -> list[str]:
    return overrides if directory is None else [*overrides, "-cd", directory]


def _prompts(words: list[str], file: Path | None) -> list[str]:
    """Returns the prompts of the command line and those of ``file``.

    Raises:
        UserError: there is none, a word looks like an option, or the file cannot be read.
    """
    unknown = [word for word in words if word.startswith("--")]
    if unknown:
        fix = (
            "python -m hpc_train generate --help lists the options; a prompt that starts with -- belongs into --prompts"
        )
        raise UserError(f"unknown option {unknown[0]}", where="the command line", fix=fix)
    found = [*words, *(() if file is None else _lines(file))]
    if not found:
        raise UserError("there is no prompt", where="the command line", fix="generate RUN 'a text', or --prompts FILE")
    return found


def _lines(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [json.loads(line) for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}", where="--prompts", fix="a UTF-8 file of prompts") from error
    wrong = [prompt for prompt in found if not isinstance(prompt, str)]
    if wrong:
        fix = 'a JSON string on each line, such as "def main("'
        raise UserError(f"{file} has {wrong[0]!r}, which is not a string", where="--prompts", fix=fix)
    return found


def _show(
    result: dict[str, Any],
    texts: list[str],
    prompts: list[list[int]],
    codec: Codec,
    ends: Sequence[int],
    as_json: bool,
) -> None:
    """Prints the texts, or one JSON object; what computed them is printed to standard error."""
    tokens: list[list[int]] = result.pop("tokens")
    completions = [_completion(codec, prompt, new, ends) for prompt, new in zip(prompts, tokens, strict=True)]
    rows = list(zip(texts, completions, tokens, strict=True))
    if as_json:
        found = [{"prompt": text, "completion": new, "tokens": ids} for text, new, ids in rows]
        print(json.dumps({**result, "completions": found}))
        return
    print(f"\n{'-' * 8}\n".join(text + new for text, new, _ in rows))
    layout = f"{result['layout']} on {result['device']}, {result['precision']}"
    number = sum(map(len, tokens))
    print(f"step {result['step']}, {number} tokens in {result['seconds']:.1f} s, {layout}", file=sys.stderr)


def _completion(codec: Codec, prompt: list[int], new: list[int], ends: Sequence[int]) -> str:
    """Returns the text that ``new`` adds, without an end token: the first word may depend on the prompt before it."""
    kept = new[:-1] if new and new[-1] in ends else new
    before, whole = codec.decode(prompt), codec.decode([*prompt, *kept])
    return whole.removeprefix(before) if whole.startswith(before) else codec.decode(kept)

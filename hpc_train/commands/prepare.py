"""``python -m hpc_train prepare`` converts text, JSONL or tables into token files, and images into tar shards."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from hpc_train.config.options import OptionParser
from hpc_train.data.conversion import Progress
from hpc_train.data.documents import BYTES, Encoder, FileEncoder, find_inputs, open_encoder
from hpc_train.data.image_shards import make_shards
from hpc_train.data.prepare import Settings, prepare
from hpc_train.data.tokens import TokensMeta
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit
from hpc_train.telemetry.terminal import Terminal

MIB = 1 << 20

_EPILOG = """\
examples:
  python -m hpc_train prepare books/ --out tokens/books --tokenizer tokenizer.json
  python -m hpc_train prepare 'dump/*.jsonl.gz' --out tokens/dump --tokenizer tokenizer.json --workers 16
  python -m hpc_train prepare 'wiki/*.parquet' --jsonl-field text --out tokens/wiki --tokenizer tokenizer.json
  python -m hpc_train prepare --images imagenet/ --out shards/imagenet
  python -m hpc_train data=tokens data.path=tokens/books data.vocab_size=50257 model.vocab_size=50257

After an interruption, run the same command again: it skips the inputs that are already done."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    if options.workers < 1:
        raise UserError(f"--workers must be at least 1, got {options.workers}", where="--workers", fix="--workers 1")
    try:
        if options.images:
            return _shards(options)
        return _tokens(options)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return Exit.DETACHED


def _tokens(options: argparse.Namespace) -> int:
    settings = Settings(
        tokenizer=options.tokenizer,
        eos=options.eos,
        bos=not options.no_bos,
        jsonl_field=options.jsonl_field or "text",
        encoding=options.encoding,
        validation_share=options.validation_share,
    )
    inputs = find_inputs(options.inputs)
    if options.jsonl_field is not None and not any(file.is_jsonl or file.is_table for file in inputs):
        raise UserError(
            "no input is JSON Lines or a table by its suffix, so each file is one document",
            where="--jsonl-field",
            fix="omit --jsonl-field, or name the files .jsonl, .ndjson or .json (or .gz), .parquet or .arrow",
        )
    console = Terminal(stderr=True)
    encoder = open_encoder(settings.tokenizer, settings.eos, settings.bos)
    if encoder.separator is None and settings.tokenizer != BYTES:
        text = f"warning: {settings.tokenizer} has no usual end token, so no token separates the documents"
        console.print(f"{text}; to name one: --eos TOKEN", soft_wrap=True, markup=False)
    with _bars(console) as bars:
        read = bars.add_task("reading", total=sum(file.size for file in inputs), inputs=f"0/{len(inputs)}")

        def show(done: Progress) -> None:
            bars.update(read, completed=done.bytes, inputs=f"{done.items}/{len(inputs)}")

        meta = prepare(inputs, settings, options.out, options.workers, show)
    if options.json:
        print(json.dumps({"out": str(options.out)} | asdict(meta)))
    else:
        print("\n".join(_summary(options.out, meta, encoder)))
    return Exit.DONE


def _shards(options: argparse.Namespace) -> int:
    if len(options.inputs) != 1 or options.shard_mib < 1:
        raise UserError(
            "--images needs one directory that contains train/ and validation/, and shards of at least 1 MiB",
            where="INPUT, --shard-mib",
            fix="prepare --images DIRECTORY --out DIR --shard-mib 1024",
        )
    with _bars(Terminal(stderr=True)) as bars:
        task = bars.add_task("packing", total=None, inputs="0")

        def show(done: Progress, total: Progress) -> None:
            bars.update(task, completed=done.bytes, total=total.bytes, inputs=f"{done.items}/{total.items}")

        meta = make_shards(Path(options.inputs[0]), options.out, options.shard_mib * MIB, options.workers, show)
    if options.json:
        print(json.dumps({"out": str(options.out)} | meta))
    else:
        counts = meta["counts"]
        images = f"{counts['train']:,} images for training and {counts['validation']:,} for validation"
        print(f"wrote {images} to {options.out}")
        overrides = f"data.path={options.out} data.n_classes={len(meta['classes'])}"
        print(f"to train on them: python -m hpc_train model=vit_base data=shards {overrides}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m hpc_train prepare",
        description="Converts text, JSONL, Parquet and Arrow files into token files for data=tokens. With --images,"
        " packs images in one folder per class into indexed tar shards for data=shards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="a file, a directory or a quoted glob; may be gzipped"
    )
    parser.add_argument("--out", type=_directory, required=True, metavar="DIR", help="output directory")
    parser.add_argument("--tokenizer", default=BYTES, help="a tokenizer.json, or bytes (default: %(default)s)")
    parser.add_argument("--eos", metavar="TOKEN", help="token after each document (default: that of the tokenizer)")
    parser.add_argument(
        "--no-bos", action="store_true", help="leave out the start token that the tokenizer puts before a text"
    )
    parser.add_argument("--jsonl-field", metavar="KEY", help="JSON key or column that holds the text (default: text)")
    parser.add_argument("--encoding", default="utf-8", help="text encoding of the inputs (default: %(default)s)")
    parser.add_argument(
        "--validation-share",
        type=float,
        default=0.01,
        metavar="X",
        help="fraction of the documents used for validation (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of processes (default: one per core, here %(default)s)",
    )
    parser.add_argument(
        "--images", action="store_true", help="pack images, in one directory per class, into tar shards"
    )
    parser.add_argument(
        "--shard-mib", type=int, default=1024, metavar="N", help="size of a shard of images (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _directory(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return Path(text)


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[inputs]} inputs"),
        TimeRemainingColumn(),
        console=console,
    )


def _summary(out: Path, meta: TokensMeta, encoder: Encoder) -> Iterator[str]:
    counts = meta.counts
    yield (
        f"wrote {counts['train']:,} tokens for training and {counts['validation']:,} for validation ({meta.dtype}, "
        f"vocabulary {meta.vocab_size}) to {out}"
    )
    if isinstance(encoder, FileEncoder):  # bytes have no tokenizer file
        tokens = " ".join(encoder.template_start)
        if not tokens:
            yield "the tokenizer has no start token"
        elif not encoder.start:
            yield f"documents begin without {tokens}, the start token of the tokenizer (--no-bos)"
        else:
            yield f"each document begins with {tokens} ({' '.join(map(str, encoder.start))})"
    if encoder.separator is None:
        yield "no token separates the documents"
    else:
        yield f"each document ends with {encoder.separator_token} ({encoder.separator})"
    yield f"to train on them: python -m hpc_train data=tokens data.path={out} data.vocab_size={meta.vocab_size}"

"""``python -m hpc_train prepare``: token files for data=tokens from text or JSONL, tar shards of images."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from hpc_train.data.documents import find_inputs
from hpc_train.data.image_shards import make_shards
from hpc_train.data.prepare import PrepareProgress, Settings, prepare
from hpc_train.data.tokens import TokensMeta
from hpc_train.errors import UserError
from hpc_train.run.exits import Exit

MIB = 1 << 20

_EPILOG = """\
examples:
  python -m hpc_train prepare books/ --out tokens/books --tokenizer tokenizer.json
  python -m hpc_train prepare 'dump/*.jsonl.gz' --out tokens/dump --tokenizer tokenizer.json --workers 16
  python -m hpc_train prepare --images imagenet/ --out shards/imagenet
  python -m hpc_train data=tokens data.path=tokens/books data.vocab_size=50257 model.vocab_size=50257

Run the same command again after an interruption: inputs that are done are not read again."""


def main(argv: list[str]) -> int:
    """Builds the files; returns an exit code."""
    options = _parser().parse_args(argv)
    if options.workers < 1:
        raise UserError(f"{options.workers} processes", where="--workers", fix="1 or more")
    if options.images:
        return _shards(options)
    settings = Settings(
        tokenizer=options.tokenizer,
        eos=options.eos,
        jsonl_field=options.jsonl_field,
        encoding=options.encoding,
        validation_share=options.validation_share,
    )
    inputs = find_inputs(options.inputs)
    console = Console(stderr=True)
    try:
        with _bars(console) as bars:
            read = bars.add_task("reading", total=sum(file.size for file in inputs), inputs=f"0/{len(inputs)}")

            def show(progress: PrepareProgress) -> None:
                done = f"{progress.inputs_done}/{len(inputs)}"
                bars.update(read, completed=progress.bytes_done, inputs=done)

            meta = prepare(inputs, settings, options.out, options.workers, show)
    except KeyboardInterrupt:
        console.print("interrupted; run the same command again to go on")
        return Exit.DETACHED
    print(json.dumps({"out": str(options.out)} | meta.to_json()) if options.json else _summary(options.out, meta))
    return Exit.DONE


def _shards(options: argparse.Namespace) -> int:
    if len(options.inputs) != 1 or options.shard_mib < 1:
        raise UserError(
            "images are one directory with train/ and validation/, in shards of 1 MiB or more",
            where="INPUT, --shard-mib",
            fix="prepare --images DIRECTORY --out DIR",
        )
    with _bars(Console(stderr=True)) as bars:
        task = bars.add_task("packing", inputs="0")

        def show(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, inputs=f"{done}/{total}")

        meta = make_shards(Path(options.inputs[0]), options.out, options.shard_mib * MIB, show)
    if options.json:
        print(json.dumps({"out": str(options.out)} | meta))
    else:
        train, validation = meta["counts"]["train"], meta["counts"]["validation"]
        print(f"{train:,} images for training and {validation:,} for validation in {options.out}")
        given = f"data.path={options.out} data.n_classes={len(meta['classes'])}"
        print(f"train on them: python -m hpc_train model=vit_base data=shards {given}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_train prepare",
        description="Turns text and JSONL files into token files that data=tokens maps into memory, or with --images"
        " class folders of images into indexed tar shards for data=shards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="a file, a directory or a quoted glob; .gz is read")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    parser.add_argument("--tokenizer", default="bytes", help="a tokenizer.json, or bytes (default: %(default)s)")
    parser.add_argument("--eos", metavar="TOKEN", help="token behind each document (default: what the tokenizer has)")
    parser.add_argument("--jsonl-field", default="text", metavar="KEY", help="where the text is (default: %(default)s)")
    parser.add_argument("--encoding", default="utf-8", help="of the inputs (default: %(default)s)")
    parser.add_argument(
        "--validation-share", type=float, default=0.01, metavar="X", help="of the documents (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes (default: the cores, here %(default)s)",
    )
    parser.add_argument("--images", action="store_true", help="tar shards of images in one directory per class")
    parser.add_argument(
        "--shard-mib", type=int, default=1024, metavar="N", help="of a shard of images (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[inputs]} inputs"),
        TimeRemainingColumn(),
        console=console,
    )


def _summary(out: Path, meta: TokensMeta) -> str:
    train, validation = meta.counts["train"], meta.counts["validation"]
    return (
        f"{train:,} tokens for training and {validation:,} for validation ({meta.dtype}, "
        f"vocabulary {meta.vocab_size}) in {out}\n"
        f"train on them: python -m hpc_train data=tokens data.path={out} data.vocab_size={meta.vocab_size}"
    )

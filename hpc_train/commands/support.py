"""``python -m hpc_train support RUN`` collects what a maintainer needs to know about a run, in a file without secrets.

Values of ``cluster.env``, keys and tokens of the environment, and passwords in addresses are replaced in every text.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from hpc_train.config.options import OptionParser
from hpc_train.config.secrets import environment_secrets, redacted, without_secrets
from hpc_train.errors import UserError
from hpc_train.opening import DamagedFile, read_tail
from hpc_train.report.page.facts import secrets_of
from hpc_train.report.page.verdict import headline, sections
from hpc_train.run.exits import Exit
from hpc_train.run.freeze import environment_versions
from hpc_train.run.owner import is_own
from hpc_train.runs.diagnosis import diagnose
from hpc_train.runs.lookup import RunHandle, find_run
from hpc_train.units import format_bytes

LARGEST = 128 << 10  # bytes per file; only the end of a longer file is included
MOST_FILES = 16  # per folder; the newest files are included
FOLDERS = ("events", "metrics", "logs", "logs/slurm")


def main(arguments: list[str]) -> int:
    """Writes the file, or with ``--list`` prints the list of its content. Raises UserError if there is no such run, it
    belongs to another user, or the file cannot be written."""
    parser = OptionParser(
        prog="python -m hpc_train support",
        description="Collects what a maintainer needs to understand a run, in one file: versions, the findings of "
        "doctor on this machine, config, record, events, the ends of metrics and logs, and the output of why. Values "
        "of cluster.env, and keys, tokens and passwords are replaced.",
    )
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the file (default: support-RUN-TIME.tar.gz)")
    parser.add_argument("--list", action="store_true", help="list the content of the file without writing it")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the file and its content")
    options = parser.parse_args(arguments)
    item = find_run(options.target, "support")
    if not is_own(item.run.path):
        raise UserError(
            f"{item.run.path} belongs to another user, who decides what is sent",
            where=options.target,
            fix="ask the owner of the run to execute this command",
        )
    values = {*secrets_of(item), *environment_secrets().values()}
    texts = {name: redacted(text, values) for name, text in _texts(item)}
    sizes = {name: len(text.encode(errors="replace")) for name, text in texts.items()}
    out = None
    if not options.list:
        name = item.run.title.replace("/", "-")
        out = options.out or Path(f"support-{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
        _write(out, texts)
    if options.json:
        print(json.dumps({"out": None if out is None else str(out), "files": sizes}))
        return Exit.DONE
    for name, size in sizes.items():
        print(f"{format_bytes(size):>10}  {name}")
    if out is not None:
        print(f"{out}: {format_bytes(out.stat().st_size)}; read it before you send it: tar -xzf {out}")
    return Exit.DONE


def _texts(item: RunHandle) -> Iterator[tuple[str, str]]:
    run = item.run
    yield "versions.json", json.dumps(environment_versions(), indent=2)
    yield "doctor.txt", _doctor()
    try:
        yield "config.yaml", yaml.safe_dump(without_secrets(item.config), sort_keys=False, allow_unicode=True)
        yield "run.json", json.dumps(run.record(), indent=2, ensure_ascii=False)
        yield "why.txt", _why(item)
    except (UserError, OSError) as error:  # damaged runs need support, too
        yield "damage.txt", str(error)
    for folder in FOLDERS:
        paths = sorted((run.path / folder).glob("*.*"), key=lambda path: path.lstat().st_mtime)
        for path in paths[-MOST_FILES:]:
            if path.is_file():
                with contextlib.suppress(DamagedFile, OSError):
                    yield f"{folder}/{path.name}", read_tail(path, run.path, LARGEST)


def _doctor() -> str:
    from hpc_train.commands.doctor import main as doctor

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            doctor([])
        except (UserError, SystemExit) as error:
            print(error)
    return output.getvalue()


def _why(item: RunHandle) -> str:
    diagnosis = diagnose(item)
    lines = [headline(diagnosis)]
    for title, content in sections(diagnosis):
        if content:
            lines += ["", title, *content]
    return "\n".join(lines)


def _write(out: Path, texts: Mapping[str, str]) -> None:
    """Writes the archive, which only its owner can read. Raises UserError if the file exists, or cannot be written."""
    folder = out.name.removesuffix(".tar.gz")
    try:
        out.touch(mode=0o600, exist_ok=False)
        with tarfile.open(out, "w:gz") as archive:
            for name, text in texts.items():
                content = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size = len(content)
                entry.mtime = int(time.time())
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise UserError(
            f"{out} cannot be written: {error.strerror}",
            where="--out",
            fix="-o FILE, a new file in a directory that you may write to",
        ) from error

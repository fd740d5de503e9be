"""Run directories that another user has prepared: what they say is data, in every command that reads them."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import hpc_train
from hpc_train import cli, opening
from hpc_train.checkpoint.manifest import FileEntry, Manifest
from hpc_train.layout.layout import Layout
from hpc_train.opening import DamagedFile, open_file, open_to_append
from hpc_train.run import freeze as freezing
from hpc_train.run.directory import RunDirectory
from hpc_train.run.events import event_row
from hpc_train.run.files import LINE_BYTES, NewLines, append_line
from hpc_train.run.imported import with_imported_model
from hpc_train.run.record import with_digest
from hpc_train.run.rows import config_sections, failure_row, metrics_row, record_of_run, text_row
from hpc_train.run.streams import CONTROLS, escape_controls, escaped
from hpc_train.runs import job_status
from hpc_train.runs.lookup import run_directories
from hpc_train.schedulers.slurm import jobs as slurm_jobs
from hpc_train.telemetry.terminal import Terminal
from tests.checkpoint.progress import LONG
from tests.other_user import OTHER, as_other, common, needs_root
from tests.run.recorded_run import READERS, UserError, record_run

__all__ = ["common"]
ESC = "\x1b[31m"
HOSTILE = f"{ESC}\x9b2J\u202e\x07x"
SECRET = "TOP-SECRET-KEY"
LAYOUT = tuple(field.name for field in fields(Layout))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of two runs: one is done, the other was given up."""
    root = tmp_path_factory.mktemp("recorded")
    record_run(root / "done", done=True)
    record_run(root / "bad", done=False)
    return root


@pytest.fixture
def root(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the two runs in the run root."""
    shutil.copytree(recorded, tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_TRAIN_ROOT", str(tmp_path / "outputs"))
    monkeypatch.setattr(freezing, "SETTLE_S", 0.0)
    monkeypatch.setattr(slurm_jobs, "ask", lambda *arguments: {})  # no Slurm
    opening.tell_once.cache_clear()
    for run in (RunDirectory(tmp_path / "outputs" / name) for name in ("done", "bad")):
        submission = run.record()["submissions"][0]
        change_record(run, submissions=[submission | {"output": str(run.logs / "slurm" / "7.out")}])
    return tmp_path / "outputs"


def change_record(run: RunDirectory, **fields: Any) -> None:
    """Changes the record with a right checksum, which anybody can compute."""
    content = json.loads((run.path / "run.json").read_bytes())
    del content["digest"]
    for name in ("run.json", "run.copy.json"):
        (run.path / name).write_text(json.dumps(with_digest(content | fields)))


FEW_READERS = {name: READERS[name] for name in ("why --json", "logs", "monitoring", "trackers")}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")
    os.lchown(path, OTHER, OTHER)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        os.truncate(file.fileno(), 200 << 30)


KINDS: dict[Callable[[Path], None], dict[str, Callable[[RunDirectory], object]]] = {
    pipe: READERS,
    sparse: FEW_READERS,
    endless: FEW_READERS,
}
FILES = (  # that are replaced together: the first two alone say what the run is
    ("config.yaml",),
    ("run.json", "run.copy.json"),
    (
        "metrics/attempt-001.jsonl", "events/agent-n1-001.jsonl", "events/rank-0000-001.jsonl", "attempts/001.json",
        "attempts/node-failures.jsonl", "logs/n1-001.log", "logs/slurm/7.out", "profile/summary.json",
        "texts/attempt-000.jsonl", "fabric.json", "plan.json", "pp_split.json",
    ),
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_huge_files_cost_a_line_and_hide_no_other_run(
    root: Path, kind: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if kind is endless and os.geteuid():
        pytest.skip("a link of this user is followed")
    run = RunDirectory(root / "bad")
    for names in FILES:
        before = {run.path / name: (run.path / name).read_bytes() for name in names if (run.path / name).exists()}
        for path in (run.path / name for name in names):
            path.unlink(missing_ok=True)
            kind(path)
        opening.tell_once.cache_clear()
        assert cli.run(["status"]) == 0
        out, err = capsys.readouterr()
        assert "outputs/done" in out and err.count("outputs/bad/") >= 1, names
        for reader in KINDS[kind].values():
            try:
                reader(run)
            except UserError as error:
                assert error.where and error.fix
        capsys.readouterr()
        for path, data in before.items():
            path.unlink()
            path.write_bytes(data)


def test_a_private_file_as_the_output_of_a_job_is_not_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The record names any file of the reader; links and names that leave the directory are no way to it either."""
    run = RunDirectory(root / "bad")
    private = root.parent / "secret.key"
    private.write_text(SECRET)
    private.chmod(0o600)
    for path in (*run.events.iterdir(), *run.metrics.iterdir()):
        path.unlink()
    submission = run.record()["submissions"][0]
    link = run.logs / "slurm" / "link.out"
    link.symlink_to(private)
    others = [] if os.geteuid() else [str(link)]
    if others:
        os.lchown(link, OTHER, OTHER)
    for output in (str(private), f"{run.path}/../../secret.key", f"{run.path}/logs/../../../secret.key", *others):
        change_record(run, submissions=[submission | {"output": output}])
        opening.tell_once.cache_clear()
        for command in ("report", "wait", "why", "status"):
            assert cli.run([command, str(run.path)]) in (0, 1, 75)
        out, err = capsys.readouterr()
        assert SECRET not in out + err + (run.path / "report.html").read_text()
        assert err.count("it is not read") == 1


def test_the_output_of_a_job_is_found_after_its_directory_was_renamed_and_linked(root: Path) -> None:
    run = RunDirectory(root / "bad")
    run.path.rename(root / "renamed")
    run.path.symlink_to(root / "renamed")
    for found in (run, RunDirectory(root / "renamed")):
        assert found.end_of_output(Path(run.record()["submissions"][0]["output"])) == "the end of the output\n"
    sweep = root / "sweep" / "slurm"
    sweep.mkdir(parents=True)
    (sweep / "7_0.out").write_text("of the array\n")
    assert RunDirectory(root / "sweep" / "0").end_of_output(sweep / "7_0.out") == "of the array\n"


def test_a_pipe_in_place_of_a_folder_hides_no_other_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One folder after the other, and all of them at the end."""
    for folder in ("metrics", "events", "attempts", "checkpoints", "logs"):
        path = root / "bad" / folder
        path.rename(root / folder)
        os.mkfifo(path)
        for command in ("why", "compare"):
            assert cli.run([command, str(root / "bad")]) in (0, 1, 2), "no exception"
        capsys.readouterr()
        assert cli.run(["status", str(root)]) in (0, 1)
        assert "done" in capsys.readouterr().out
        path.unlink()
        (root / folder).rename(path)
    for folder in ("metrics", "events", "attempts", "checkpoints", "logs"):
        shutil.rmtree(root / "bad" / folder)
        os.mkfifo(root / "bad" / folder)
    for command in ("status", "why", "compare", "report"):
        assert cli.run([command, str(root / "bad")]) in (0, 1, 2), "no exception"


@pytest.mark.parametrize("names", [("0x", "9 9", "9" * 200), ("999999999",)])
def test_a_name_like_that_of_an_attempt_neither_raises_nor_hangs(root: Path, names: tuple[str, ...]) -> None:
    run = RunDirectory(root / "bad")
    for name in names:
        (run.attempts / f"{name}.json").write_text("{}")
    shutil.rmtree(run.metrics)  # the readers look for the newest attempt that has logged a step
    for command in ("status", "why", "logs", "compare", "wait"):
        assert cli.run([command, str(run.path)]) in (0, 1, 2, 75), "no exception"


@pytest.mark.parametrize("layout", [{"dp": "x"}, {"x": 1}, dict.fromkeys(LAYOUT, "x"), dict.fromkeys(LAYOUT, 0)])
def test_a_damaged_layout_of_a_checkpoint_is_unknown(
    root: Path, layout: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    step = root / "done" / "checkpoints" / "step-00000009"
    step.mkdir(parents=True)
    (step / "manifest.json").write_bytes(Manifest(9, {".metadata": FileEntry(0, "")}, layout=layout).encode())
    assert cli.run(["checkpoint", "list", str(root / "done")]) in (0, 1)
    assert "9" in capsys.readouterr().out


def test_what_is_no_job_id_never_reaches_slurm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain without end would make ``squeue``, and so ``status`` of all runs, time out."""
    asked: list[str] = []
    monkeypatch.setattr(slurm_jobs, "ask", lambda selection, *_: asked.extend(selection) or {})
    for name, submission in (
        ("bad", {"job_id": "7;x", "chain": ["7", "x y"]}),
        ("done", {"job_id": "9", "chain": [str(number) for number in range(20_000)]}),
    ):
        change_record(RunDirectory(root / name), submissions=[submission | {"time": 1.0}], claimed_by=None)
    assert cli.run(["status", str(root)]) == 0
    assert [word for word in asked if word.startswith("--jobs=")] == ["--jobs=9"]


def test_a_rank_of_thousands_of_digits_is_text(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(root / "bad")
    line = f"2026-11-28T05:27:27.696 [{'9' * 5000}] text"
    (run.logs / "n1-001.log").write_text(f"{line}\n")
    assert cli.run(["logs", str(run.path)]) == 0
    assert line in capsys.readouterr().out


def test_a_config_whose_aliases_have_no_end_hides_no_other_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line stands for ten times the one before."""
    lines = [f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 10)}]\n" for number in range(1, 12)]
    run = RunDirectory(root / "bad")
    text = run.config.read_text() + "a0: &a0 [x]\n" + "".join(lines)
    run.config.write_text(text)
    change_record(run, config_hash=hashlib.sha256(text.encode()).hexdigest())
    assert cli.run(["status", str(root)]) == 0
    assert "outputs/done" in capsys.readouterr().out
    for command in ("why", "report", "compare"):
        assert cli.run([command, str(run.path)]) in (0, 1, 2), "no exception"
    with pytest.raises(UserError, match="YAML aliases"):
        freezing.load(run)


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"model": 1}', '{"model": {"x": 1}}', "{"])
def test_a_damaged_description_of_imported_weights_is_named(root: Path, text: str) -> None:
    (root / "done" / "imported.json").write_text(text)
    with pytest.raises(DamagedFile, match=r"imported\.json"):
        with_imported_model([f"run.root={root}", "run.name=done", "run.fork=new"])


@needs_root
def test_a_run_to_fork_need_not_be_writable(common: Path) -> None:
    (common / "old").mkdir(mode=0o755)
    overrides = [f"run.root={common}", "run.name=old", "run.fork=new"]
    as_other(lambda: with_imported_model(overrides))


@needs_root
def test_the_slurm_folder_of_a_sweep_is_no_link_of_another_user(root: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret.key").write_text(SECRET)
    run = RunDirectory(root / "done")
    slurm = root / "slurm"
    slurm.symlink_to(home)
    assert run.end_of_output(slurm / "secret.key") == SECRET, "a user may keep the outputs on another disk"
    os.lchown(slurm, OTHER, OTHER)
    assert run.end_of_output(slurm / "secret.key") == ""
    assert run.end_of_output(home / "secret.key") == ""


@needs_root
def test_links_of_other_users_are_not_followed_and_those_of_this_user_are(root: Path, tmp_path: Path) -> None:
    run = RunDirectory(root / "done")
    elsewhere = tmp_path / "elsewhere"
    run.metrics.rename(elsewhere)
    run.metrics.symlink_to(elsewhere)
    assert len(run.read_metrics()) == 6, "a user may keep a part of a run on another disk"
    os.lchown(run.metrics, OTHER, OTHER)
    assert run.read_metrics() == []
    with pytest.raises(DamagedFile, match="symbolic link of another user"):
        open_file(run.metrics_file(0), run.path)
    with pytest.raises(OSError, match="symbolic link of another user"):
        open_to_append(run.metrics_file(0), run.path)


@needs_root
def test_what_is_appended_does_not_follow_a_link_of_another_user(tmp_path: Path) -> None:
    own = tmp_path / ".bashrc"
    own.write_text("mine\n")
    (tmp_path / "estimates.jsonl").symlink_to(own)
    os.lchown(tmp_path / "estimates.jsonl", OTHER, OTHER)
    with pytest.raises(OSError, match="symbolic link of another user"):
        append_line(tmp_path / "estimates.jsonl", {"a": 1})
    assert own.read_text() == "mine\n"


def test_a_line_without_an_end_is_read_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bytes(3 * LINE_BYTES))
    read: list[int] = []
    right = opening.open_file

    class Counted:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.close()

        def read(self, size: int) -> bytes:
            data: bytes = self.file.read(size)
            read.append(len(data))
            return data

        def seek(self, position: int) -> None:
            self.file.seek(position)

    monkeypatch.setattr("hpc_train.run.files.open_file", lambda *arguments: Counted(right(*arguments)))
    assert list(NewLines(path).read()) == [{"step": 1}]
    assert sum(read) < 2 * LINE_BYTES


def test_links_between_directories_neither_multiply_nor_rename_runs(tmp_path: Path) -> None:
    for name in ("a/one", "b/two"):
        (tmp_path / name / "attempts").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    for folder in ("a", "b", "a0"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for number in range(30):
            (tmp_path / folder / f"link{number}").symlink_to(tmp_path)
            (tmp_path / folder / f"sweep{number}").symlink_to(tmp_path / "b")
    assert sorted(run_directories(tmp_path)) == [tmp_path / "a/one", tmp_path / "b/two"]


def test_whatever_is_wrong_with_a_run_the_others_are_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = job_status.attempt_end

    def broken(run: RunDirectory, attempt: int) -> object:
        if run.path.name == "bad":
            raise KeyError("event")
        return right(run, attempt)

    monkeypatch.setattr(job_status, "attempt_end", broken)
    assert cli.run(["status"]) == 0
    out, err = capsys.readouterr()
    assert "outputs/done" in out and "outputs/bad: the run cannot be read: KeyError: 'event'" in err


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400) | st.text(max_size=3) | st.just(ESC),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


@settings(
    derandomize=True,
    max_examples=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate] if LONG else [Phase.explicit],
)
@given(
    name=st.sampled_from(["done", "bad"]), values=st.lists(JSON, min_size=4, max_size=4), seed=st.integers(0, 1 << 30)
)
@example(name="done", values=[None, True, -1, 10**400], seed=1)
@example(name="bad", values=[ESC, [], {}, float("nan"), 1e308, [None], {"a": 1}, 3], seed=2)
def test_values_of_any_type_raise_nothing_in_any_reader(
    recorded: Path, name: str, values: list[Any], seed: int
) -> None:
    """Each example has a wrong value in each line and record, in a field of its own or one level below."""
    choose = random.Random(seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HPC_TRAIN_ROOT", str(recorded))
        patched.setattr(freezing, "SETTLE_S", 0.0)
        patched.setattr(slurm_jobs, "ask", lambda *arguments: {})
        patched.setattr(sys, "stdout", StringIO())
        patched.setattr(sys, "stderr", StringIO())
        run = RunDirectory(recorded / name)
        files = [path for path in sorted(run.path.rglob("*.json*")) if path.name != "run.copy.json"]
        before = {path: path.read_text() for path in files}
        try:
            for path, text in before.items():
                changed = [_mutated(json.loads(line), values, choose) for line in _values_in(path, text)]
                if path.name == "run.json":
                    del changed[0]["digest"]
                    changed = [with_digest(changed[0])]
                path.write_text("".join(f"{json.dumps(value)}\n" for value in changed))
            for reader in READERS.values():
                try:
                    reader(run)
                except UserError as error:
                    assert error.where and error.fix
        finally:
            for path, text in before.items():
                path.write_text(text)


def _values_in(path: Path, text: str) -> list[str]:
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def _mutated(value: dict[str, Any], values: list[Any], choose: random.Random) -> dict[str, Any]:
    key = choose.choice(sorted(value))
    inner = value[key]
    if key == "digest":
        return value
    if isinstance(inner, dict) and inner and choose.random() < 0.5:
        return value | {key: _mutated(inner, values, choose)}
    if isinstance(inner, list) and inner and isinstance(inner[0], dict) and choose.random() < 0.5:
        return value | {key: [_mutated(inner[0], values, choose), *inner[1:]]}
    return value | {key: choose.choice(values)}


@settings(
    derandomize=True,
    max_examples=100 if LONG else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.generate],
)
@given(row=st.dictionaries(st.sampled_from(["time", "attempt", "event", "step", "result", "cluster", "x"]), JSON))
def test_a_checked_row_is_itself_when_it_is_checked_again(row: dict[str, Any]) -> None:
    for check in (event_row, metrics_row, failure_row, text_row, record_of_run, config_sections):
        found = check(row)
        assert found is None or check(found) == found


def test_wrong_values_are_told_in_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(root / "done")
    lines = run.events_file("agent-n1", 1).read_text()
    run.events_file("agent-n1", 1).write_text(lines + '{"time":1,"attempt":0,"exit_code":0}\n' * 3)
    assert cli.run(["status"]) == 0
    out, err = capsys.readouterr()
    assert "outputs/done" in out
    assert err.count("agent-n1-001.jsonl has lines with values of a wrong type, which are left out") == 1


NAMES = (
    "event", "node", "job_id", "output", "run_id", "config_hash", "kind", "host", "pid_started", "executor",
)  # fmt: skip


def _hostile(value: Any) -> Any:
    """Returns ``value`` with control characters in each text that is not a name of the format."""
    if isinstance(value, dict):
        return {key: inner if key in NAMES else _hostile(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(_hostile, value))
    return value if not isinstance(value, str) or value in ("forward", "backward", "user_error") else value + HOSTILE


def test_no_control_character_of_a_run_reaches_the_terminal(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("done", "bad"):
        run = RunDirectory(root / name)
        for path in (path for path in run.path.rglob("*.jsonl")):
            rows = [_hostile(json.loads(line)) for line in path.read_text().splitlines()]
            rows = [row | {f"val_{HOSTILE}": 1.0} for row in rows]
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        content = json.loads((run.path / "run.json").read_bytes())
        del content["digest"]
        change_record(run, **_hostile(content))
        (run.logs / "n1-001.log").write_text(f"2026-11-28T05:27:27.696 [0] {HOSTILE}\n{HOSTILE}\n")
        run.path.rename(root / f"{name}{HOSTILE}")
    found = sorted(root.iterdir())
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    escape_controls()
    commands = [["status"], ["compare", *map(str, found)], ["checkpoint", "list", str(found[0])]]
    commands += [[name, str(path)] for name in ("status", "why", "logs", "report", "wait") for path in found]
    for command in commands:
        code = cli.run(command)
        out, err = capsys.readouterr()
        assert code in (0, 1, 75), f"{command}: {err}"
        assert "\\x1b[31m" in out + err or command[0] in ("checkpoint",), f"{command} shows nothing of the text"
        assert not CONTROLS.search(out + err), f"{command}: {CONTROLS.findall(out + err)}"
    assert cli.run(["logs", "--raw", str(found[0])]) == 0
    assert HOSTILE in capsys.readouterr().out
    for path in root.glob("*/report.html"):
        assert "\x1b" not in path.read_text()


def test_the_command_line_escapes_what_it_prints(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "done").rename(root / f"done{HOSTILE}")
    monkeypatch.setattr(sys, "argv", ["hpc-train", "status"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    with pytest.raises(SystemExit) as end:
        cli.main()
    out, err = capsys.readouterr()
    assert end.value.code == 0 and "\\x1b[31m" in "".join(out.split())
    assert not CONTROLS.search(out + err)


def test_colors_of_our_own_reach_a_terminal_and_those_in_text_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    escape_controls()
    text = HOSTILE.replace("\x07", "")  # rich removes a bell
    Terminal(force_terminal=True, color_system="standard").print(f"[bold]ours[/bold] {text}", highlight=False)
    print(f"\rprinted {text}")
    shown = terminal.getvalue()
    assert shown.startswith("\x1b[1mours\x1b[0m ")
    assert shown.count("\x1b") == 2 and not CONTROLS.search(shown.replace("\x1b", "").replace("\r", ""))
    assert shown.count(escaped(text)) == 2 and "\rprinted" in shown


PRODUCT = Path(hpc_train.__file__).parent
ROOMS = ("launch", "commands", "run", "runs", "telemetry", "elastic", "report")
DIRECT = {  # function with a direct access -> what it opens, which is no file of a run directory to be read
    "run/streams.py": "the null device",
    "run/processes.py": "/proc",
    "run/file_lock.py": "a lock that this process has created",
    "run/files.py": "files that it creates, and files of the user",
    "run/directory.py": "the number of an attempt that it creates",
    "run/snapshot.py": "the code of the user",
    "commands/submitted.py": "/proc",
    "launch/executors/local.py": "locks in the directory of the sweep",
    "launch/command_job.py": "the log of a job that this process has submitted, below its run root",
    "commands/compare.py": "--csv",
    "commands/model.py": "--prompts",
    "commands/batch.py": "the script of the user",
    "commands/init.py": "the template, and files that it creates",
    "commands/init_site.py": "the site file of the user",
    "commands/support.py": "the archive that it creates",
    "report/plots.py": "--out",
    "report/registry.py": "a tracker, and a file that this process has downloaded",
    "report/monitoring/exits.py": "the token, and files that it creates",
    "run/event_log.py": "the kernel's files",
    "elastic/script.py": "the metrics that the user's own command writes",
    "elastic/requeue.py": "the end of a job that it creates",
    "elastic/rendezvous/addresses.py": "the address that it creates",
}


def _direct(tree: ast.AST) -> Iterator[str]:
    """Yields the calls that open a file without ``hpc_train.opening``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Attribute):
            if called.attr in ("read_text", "read_bytes") or (
                called.attr == "open" and ast.unparse(called.value) not in ("EventLog", "self.backend", "super()")
            ):
                yield ast.unparse(node)
        elif isinstance(called, ast.Name) and called.id == "open":
            yield ast.unparse(node)


def test_files_of_a_run_are_opened_at_one_place() -> None:
    found = {
        path.relative_to(PRODUCT).as_posix(): calls
        for room in ROOMS
        for path in sorted((PRODUCT / room).rglob("*.py"))
        if re.search(r"\bopen\(|\.read_(text|bytes)\(", text := path.read_text())
        and (calls := list(_direct(ast.parse(text))))
    }
    assert {path: calls for path, calls in found.items() if path not in DIRECT} == {}
    assert set(DIRECT) <= set(found), "exceptions that no file needs"


def test_tables_and_colors_are_printed_with_the_terminal_that_escapes() -> None:
    consoles = [
        path.relative_to(PRODUCT).as_posix()
        for path in sorted(PRODUCT.rglob("*.py"))
        if re.search(r"\bConsole\(", path.read_text()) and path.name != "terminal.py"
    ]
    assert consoles == []

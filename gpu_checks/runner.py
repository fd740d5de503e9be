"""Runs checks one after the other, each in a separate process, within a budget of seconds.

The processes are forked from one that has imported torch and has not touched CUDA, which saves the import in each. The
runner itself imports no torch, and survives a check that raises, crashes, hangs or leaves processes behind. What is
known stands in ``results.jsonl`` at any time: a runner that is killed loses only the check that it was in, and another
one with the same folder goes on behind the checks that have passed on this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing as mp
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from gpu_checks.check import Check, Place, Probe, Verdict, append, last_run, read, table

RESERVE_S = 5.0  # kept of the budget for the end
CPU_SLACK = 3  # a check may take so many times its limit without a GPU, on cores that others use as well
STACKS_S = 3.0  # before its limit a check writes its stacks
FAILURES = "failures.log"
HEAD_BYTES, TAIL_BYTES, MOST_BYTES = 20_000, 200_000, 12 << 20  # of one failure's output; of FAILURES
PRELOAD = ["torch", "torch.distributed.fsdp", "torch.profiler", "hpc_train.train.worker"]
_MACHINE = """import json, torch
gpus = torch.cuda.device_count()
names = [torch.cuda.get_device_name(index) for index in range(gpus)]
print(json.dumps({"gpus": gpus, "devices": names, "torch": torch.__version__}))"""


def find_machine(timeout_s: float = 90) -> dict[str, Any]:
    """Returns how many GPUs torch sees and which, and the versions.

    Raises:
        RuntimeError: torch cannot be imported, or CUDA does not start.
    """
    command = [sys.executable, "-c", _MACHINE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"torch does not start on this machine:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "python": platform.python_version()}


@dataclass
class Runner:
    """Runs checks within ``budget_s`` and writes what they find to ``place.out``.

    Args:
        machine: what results are valid for (``find_machine``); the checks that have passed on another run again.
        preload: the modules that the checks' processes find imported.
        again: whether what has passed before runs again.
    """

    place: Place
    machine: dict[str, Any]
    budget_s: float
    preload: Sequence[str] = tuple(PRELOAD)
    again: bool = False
    _began: float = field(default_factory=time.monotonic, init=False)

    def run(self, checks: Sequence[Check]) -> bool:
        """Runs what has not passed yet; returns whether no check has failed."""
        self.place.out.mkdir(parents=True, exist_ok=True)
        passed = set() if self.again else self._passed_before()
        append(self.place.out, {"kind": "machine", **self.machine})
        context = mp.get_context("forkserver")
        if self.preload:  # a test keeps those of its own process
            context.set_forkserver_preload([*self.preload])
        for check in checks:
            if check.name not in passed:
                self._run(check, context)
        text = table(read(self.place.out), [check.name for check in checks])
        (self.place.out / "table.md").write_text(text)
        print(text, flush=True)
        return not any(verdict.is_failure for verdict in self._verdicts().values())

    def left_s(self) -> float:
        """Returns the seconds that checks may still take."""
        return self.budget_s - RESERVE_S - (time.monotonic() - self._began)

    def _run(self, check: Check, context: Any) -> None:
        reason = self._why_not(check)
        if reason:
            self._end(check, Verdict.NOT_RUN, 0.0, reason)
            return
        print(f"{check.name} …", flush=True)
        append(self.place.out, {"kind": "begin", "check": check.name})
        begin = time.monotonic()
        limit = min(self._limit_s(check), self.left_s())
        log = Path(self.place.scratch) / f"{check.name}.log"
        process = context.Process(
            target=run_check, args=(replace(check, limit_s=limit), self.place, log), name=check.name
        )
        try:
            process.start()
        except (OSError, EOFError) as error:
            self._end(check, Verdict.CRASHED, 0.0, f"its process cannot be started: {error!r}", log)
            return
        process.join(limit)
        slow = process.is_alive()
        kill_all(process)
        verdict, reason = self._verdict(check, process, slow, limit)
        self._end(check, verdict, time.monotonic() - begin, reason, log)

    def _limit_s(self, check: Check) -> float:
        return check.limit_s * (1 if self.place.gpus else CPU_SLACK)

    def _why_not(self, check: Check) -> str:
        if check.gpus > 1 and self.place.ranks < check.gpus:
            return f"it needs {check.gpus} GPUs" if self.place.gpus else f"no GPU (it needs {check.gpus})"
        if check.gpus == 1 and not self.place.gpus:
            return "no GPU"
        if self.left_s() < min(check.least_s, check.limit_s):
            return f"{max(0.0, self.left_s()):.0f} s of the budget are left, and it needs {check.least_s:g}"
        return ""

    def _verdict(self, check: Check, process: BaseProcess, slow: bool, limit: float) -> tuple[Verdict, str]:
        if slow and limit < self._limit_s(check):
            return Verdict.CUT_OFF, f"the budget ended after {limit:.0f} s of it"
        if slow:
            return Verdict.TOO_SLOW, f"it took more than {limit:g} s"
        code = process.exitcode or 0
        if code < 0:
            return Verdict.CRASHED, f"killed by {signal.Signals(-code).name}"
        if code > 0:
            return Verdict.CRASHED, f"ended with {code}: {self._last_line(check)}"
        outcomes = [line["ok"] for line in self._findings(check) if line["ok"] is not None]
        if not outcomes:
            return Verdict.CRASHED, "it ended without checking anything"
        return (Verdict.PASSED, "") if all(outcomes) else (Verdict.FAILED, f"{outcomes.count(False)} not as expected")

    def _end(self, check: Check, verdict: Verdict, seconds: float, reason: str, log: Path | None = None) -> None:
        if verdict.is_failure and log is not None:
            keep_output(check.name, f"{verdict}: {reason}", log, self.place.out / FAILURES)
        line = {"check": check.name, "verdict": verdict, "seconds": round(seconds, 1), "reason": reason}
        append(self.place.out, {"kind": "verdict", **line})
        print(f"{check.name}: {verdict}{': ' * bool(reason)}{reason} ({seconds:.1f} s)", flush=True)

    def _last_line(self, check: Check) -> str:
        text = (self.place.scratch / f"{check.name}.log").read_text(errors="replace").strip()
        return text.rpartition("\n")[2][:300]

    def _findings(self, check: Check) -> list[dict[str, Any]]:
        """Returns the findings of the present run of ``check``."""
        return last_run([line for line in read(self.place.out) if line.get("check") == check.name])[0]

    def _verdicts(self) -> dict[str, Verdict]:
        lines = read(self.place.out)
        return {line["check"]: Verdict(line["verdict"]) for line in lines if line["kind"] == "verdict"}

    def _passed_before(self) -> set[str]:
        """Returns the checks that have passed on this machine, in an earlier run with this folder."""
        passed: set[str] = set()
        same = False
        for line in read(self.place.out):
            if line["kind"] == "machine":
                same = {key: line.get(key) for key in self.machine} == self.machine
            elif line["kind"] == "verdict":
                (passed.add if same and line["verdict"] == Verdict.PASSED else passed.discard)(line["check"])
        return passed


def run_check(check: Check, place: Place, log: Path) -> None:
    """The process of a check: all output goes to ``log``, and shortly before the limit the stacks of all threads."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the runner
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, check.limit_s - STACKS_S))
    try:
        check.function()(Probe(check, place))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # without the end of Python's threads and of process groups, which may hang


def kill_all(process: BaseProcess) -> None:
    """Kills a check's process with all that it has started, also in sessions of their own, and waits for their end."""
    found = []
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    with contextlib.suppress(OSError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    for one in found:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(found, timeout=5)


def keep_output(name: str, title: str, log: Path, kept: Path) -> None:
    """Appends the output of a failed check to ``kept``, without its middle if it is long."""
    output = log.read_bytes() if log.exists() else b""
    if len(output) > HEAD_BYTES + TAIL_BYTES:
        left_out = f"\n… {len(output) - HEAD_BYTES - TAIL_BYTES:,} bytes left out …\n".encode()
        output = output[:HEAD_BYTES] + left_out + output[-TAIL_BYTES:]
    size = kept.stat().st_size if kept.exists() else 0
    with kept.open("ab") as file:
        file.write(f"===== {name}: {title} =====\n".encode() + output[: max(0, MOST_BYTES - size)] + b"\n")


@contextlib.contextmanager
def scratch_folder() -> Any:
    """A folder that is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="hpc_train-gpu-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

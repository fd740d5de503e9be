"""The commands that act on submitted runs: ``resume``, ``retry``, ``cancel``, ``wait``, ``resize`` and ``stacks``.

The owner of a run can write any process id and job id into its record. For a run of another user, a command therefore
acts on a process or job only if it is proved to belong to the caller and to work on that run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from itertools import dropwhile
from operator import attrgetter
from pathlib import Path

from hpc_train.config.options import OptionParser
from hpc_train.config.run_path import default_root
from hpc_train.errors import UserError
from hpc_train.launch.submission import POLL_S as JOBS_POLL_S
from hpc_train.launch.submission import resubmit, worst
from hpc_train.report.page.build import write_after, write_sweep_at_end
from hpc_train.run.directory import RunDirectory, lease_folder
from hpc_train.run.events import Event
from hpc_train.run.exits import Exit
from hpc_train.run.file_lock import LockOwner, newest_lock
from hpc_train.run.lease import is_live
from hpc_train.run.owner import TRUST, foreign_owner
from hpc_train.run.processes import started
from hpc_train.run.requests import record_stop_request, request_resize, request_stacks, stacks_answers
from hpc_train.runs.comparison import Comparison, metric_of
from hpc_train.runs.job_status import JobStatuses, View, outcome
from hpc_train.runs.job_table import JobTable, print_messages, print_results
from hpc_train.runs.lookup import COMMENT, RunHandle, find_run, find_runs, statuses_of
from hpc_train.schedulers.current import OtherJobs
from hpc_train.schedulers.slurm.client import on_clusters
from hpc_train.schedulers.slurm.jobs import ask, status_of
from hpc_train.telemetry.progress import is_done, train_longer
from hpc_train.telemetry.terminal import Terminal
from hpc_train.units import counted
from hpc_train.users import name_of_user


def resume(arguments: list[str]) -> int:
    """Continues a run with its frozen config from its newest checkpoint.

    The run directory and the W&B run stay the same. To continue with other settings, start a new training with the
    same ``run.name``.
    """
    parser = _parser(resume)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    _add_submission_options(parser)
    options, rest = parser.parse_known_args(arguments)
    item = find_run(options.target, "resume", trust_owner=options.trust_owner)
    if rest and not all("=" in word and word[0] != "-" for word in rest):
        parser.error(f"unrecognized arguments: {shlex.join(rest)}")
    if rest:  # the command repeats the overrides of the run
        name = os.path.relpath(item.run.path, default_root())
        replaced = {_key(override) for override in rest} | {"run.name"}
        others = [override for override in item.run.record().get("overrides", []) if _key(override) not in replaced]
        command = shlex.join(["python", "-m", "hpc_train", f"run.name={name}", *others, *rest])
        raise UserError(
            f"resume continues with the frozen settings of the run, got {shlex.join(rest)}",
            where="the command line",
            fix=f"the command that started the run (with its -cd DIR, if it had one) and these overrides: {command}",
        )
    if is_done(item.run) and any(item.run.checkpoints.glob("step-*")):
        if options.json:
            print(outcome(item.run, View("done", {}, Exit.DONE)))
            return Exit.DONE
        record = item.run.record()
        done = record["result"]["steps"]
        total = record.get("total_steps") or done
        print(f"already done: {done} of {total} steps; to train longer, {train_longer(record)}")
        return Exit.DONE
    return _resubmit([item], item.run.path, options)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def retry(arguments: list[str]) -> int:
    """Resubmits the runs of a sweep that failed or were stopped."""
    parser = _parser(retry)
    parser.add_argument(
        "--failed", required=True, metavar="SWEEP", help="resubmit the failed, stopped and cancelled runs"
    )
    _add_submission_options(parser)
    options = parser.parse_args(arguments)
    runs = find_runs(options.failed, "retry", trust_owner=options.trust_owner)
    statuses = statuses_of(runs, JobStatuses())
    unfinished = [item for item in runs if item.view(statuses).exit not in (None, Exit.DONE)]
    message = f"resubmitting {len(unfinished)} of {len(runs)} runs"
    if not unfinished:
        message += ": none has failed, stopped or been cancelled"
    print(message, file=sys.stderr if options.json else sys.stdout)
    if not unfinished:
        return Exit.DONE
    sweep = unfinished[0].run.path
    if len(runs) > 1:
        sweep = sweep.parent
    compared = Comparison.of((item.run for item in runs), metric_of(unfinished[0].config))
    return _resubmit(unfinished, sweep, options, compared)


def _add_submission_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--detach", action="store_true", help="return after submission")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print only one JSON object per run at the end; messages go to standard error",
    )
    parser.add_argument(
        "--code",
        choices=["run", "now"],
        default="run",
        help="run the frozen code again, or the current code of the git work tree it was copied from (default: run)",
    )
    parser.add_argument(TRUST, action="store_true", help="continue runs that belong to another user")


def _resubmit(
    runs: list[RunHandle], sweep: Path, options: argparse.Namespace, comparison: Comparison | None = None
) -> int:
    return resubmit(
        runs, sweep, detach=options.detach, as_json=options.json, code_now=options.code == "now", comparison=comparison
    )


def cancel(arguments: list[str]) -> int:
    """Cancels jobs. With ``--save`` they save a checkpoint first."""
    parser = _parser(cancel)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument(
        "--save", action="store_true", help="wait until running jobs have saved a checkpoint, so that they can resume"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the numbers of jobs")
    options = parser.parse_args(arguments)
    runs = find_runs(options.target, "cancel")
    count = cancel_runs(runs, save=options.save)
    ended = len(runs) - count
    if options.json:
        print(json.dumps({"cancelled": count, "ended_before": ended}))
        return Exit.DONE
    message = f"cancelling {count} of {counted(len(runs), 'job', 'jobs')}"
    if count and (options.save or any(item.lives_here() for item in runs)):
        are_commands = all(item.run.record().get("own_code") == "command" for item in runs)
        message += "; their programs get SIGTERM first" if are_commands else "; they save a checkpoint first"
    if ended:
        message += f"; {counted(ended, 'is', 'are')} not waiting or running"
    print(message)
    return Exit.DONE


def cancel_runs(runs: Sequence[RunHandle], *, save: bool) -> int:
    """Cancels the jobs of ``runs`` and returns how many were waiting or running.

    Args:
        save: whether running jobs save a checkpoint first. A job on this machine always does.

    Raises:
        UserError: the scheduler refuses, or a run of another user names a process or job that is not proved to be the
            caller's and to work on this run. Nothing was cancelled then.
    """
    for item in runs:
        refuse_unproven(item)
    known = JobStatuses()
    statuses = statuses_of(runs, known)
    queued = [item for item in runs if item.job_key in statuses and statuses[item.job_key].present]
    for item in queued:
        if isinstance(item.jobs, OtherJobs):
            item.jobs.cancel(item.job_ids)  # raises the error before any job is cancelled
    local = [item for item in runs if item.lives_here()]
    for item in local:
        record_stop_request(item.run)
        os.kill(item.submission["pid"], signal.SIGTERM)
    for item in queued:
        record_stop_request(item.run)
    for jobs in {item.jobs for item in queued}:
        ids = [job_id for item in queued if item.jobs == jobs for job_id in (*item.job_ids, *item.withdrawn)]
        states = known.of(ids, jobs)
        running = [job_id for job_id in ids if save and job_id in states and states[job_id].is_running]
        jobs.cancel(running, save=True)
        jobs.cancel([job_id for job_id in ids if job_id not in running])
    return len(queued) + len(local)


def wait(arguments: list[str]) -> int:
    """Waits until submitted runs end, and returns the worst of their exit codes."""
    parser = _parser(wait)
    parser.add_argument("target", metavar="RUN|SWEEP", help="a run or sweep directory, or its name")
    parser.add_argument("--json", action="store_true", help="print only one JSON object per run at the end")
    options = parser.parse_args(arguments)
    runs = find_runs(options.target, "wait")
    console = Terminal()
    table = None if options.json else JobTable(runs, console)
    try:
        views = _until_the_end(runs, table)
    except KeyboardInterrupt:
        return Exit.DETACHED
    if options.json:
        print("\n".join(outcome(item.run, view) for item, view in zip(runs, views, strict=True)))
        return worst(views)
    print_messages(runs, views)
    if len(runs) > 1:
        print_results(runs, views, console)
        by_path = {item.run.path: view for item, view in zip(runs, views, strict=True)}
        write_sweep_at_end(runs[0].run.path.parent, by_path)
    else:
        write_after(runs[0].run)
    return worst(views)


def _until_the_end(runs: list[RunHandle], table: JobTable | None) -> list[View]:
    slurm = JobStatuses()
    try:
        while True:
            statuses = statuses_of(runs, slurm)
            views = [item.view(statuses) for item in runs]
            if table is not None:
                table.show(views)
            if all(view.exit is not None or not item.submission for item, view in zip(runs, views, strict=True)):
                return views
            time.sleep(JOBS_POLL_S)
    finally:
        if table is not None:
            table.close()


ANSWERS_POLL_S = 0.2


def resize(arguments: list[str]) -> int:
    parser = _parser(resize)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument("nodes", metavar="nodes=N", help="the number of nodes that train")
    parser.add_argument(
        "--wait", type=float, default=60, metavar="SECONDS", help="wait this long until it does (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the answer of the run")
    options = parser.parse_args(arguments)
    name, _, number = options.nodes.partition("=")
    if name != "nodes" or not number.isdecimal():
        raise UserError(f"resize takes nodes=N, got {options.nodes}", where="the command line", fix="nodes=2")
    run = find_run(options.target, "resize").run
    answered = len(_resize_answers(run))
    request_resize_of(run, int(number), "the command resize")
    until = time.monotonic() + options.wait
    while True:
        answers = [*dropwhile(lambda event: event.get("nodes") != int(number), _resize_answers(run)[answered:])]
        newest = answers[-1] if answers else None
        is_over = newest is not None and (newest.name != "resize_requested" or newest["nodes"] == newest["before"])
        if is_over or time.monotonic() > until or not is_live(run):
            break
        time.sleep(ANSWERS_POLL_S)
    state = "unanswered"
    message = "the agent of node 0 does not answer" if is_live(run) else "the run has ended"
    if newest is not None and (is_over or is_live(run)):
        state = newest.name.removeprefix("resize_")
        message = newest.message
    if options.json:
        print(json.dumps({"state": state, "nodes": int(number), "message": message}))
    elif state in ("requested", "resized"):
        print(message)
    else:
        print(f"not resized: {message}", file=sys.stderr)
    return {"unanswered": Exit.FAILED, "refused": Exit.REFUSED}.get(state, Exit.DONE)


def request_resize_of(run: RunDirectory, nodes: int, reason: str) -> None:
    """Asks the agents of ``run`` to continue on ``nodes`` nodes; raises UserError if it is not live or not the
    caller's.
    """
    if nodes < 1:
        raise UserError(f"a run cannot train on {nodes} nodes", where="nodes", fix="nodes=1 or more")
    refuse_foreign_lease(run)
    live_nodes(run)
    request_resize(run, nodes, reason)


def _resize_answers(run: RunDirectory) -> list[Event]:
    names = ("resize_requested", "resize_refused", "resized")
    return sorted((event for event in run.events_of("agent-*") if event.name in names), key=attrgetter("time"))


def stacks(arguments: list[str]) -> int:
    """Prints the Python stack of every rank of a live run without stopping it."""
    parser = _parser(stacks)
    parser.add_argument("target", metavar="RUN", help="a run directory, or its name")
    parser.add_argument(
        "--wait", type=float, default=30, metavar="SECONDS", help="wait this long for the answers (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the text of each node")
    options = parser.parse_args(arguments)
    run = find_run(options.target, "stacks").run
    refuse_foreign_lease(run)
    nodes = live_nodes(run)
    texts = stacks_of(run, nodes, options.wait)
    if options.json:
        print(json.dumps({"nodes": nodes, "stacks": texts}))
    else:
        for text in texts.values():
            print(text)
    if len(texts) < nodes:
        print(f"{nodes - len(texts)} of {nodes} nodes did not answer within {options.wait:g} s", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


def stacks_of(run: RunDirectory, nodes: int, wait_s: float) -> dict[str, str]:
    """Returns the stacks by node, without the nodes that do not answer within ``wait_s``."""
    number = request_stacks(run)
    until = time.monotonic() + wait_s
    while len(paths := stacks_answers(run, number)) < nodes and time.monotonic() < until:
        time.sleep(ANSWERS_POLL_S)
    return {path.stem.partition("-")[2]: run.read(path).decode(errors="replace") for path in paths}


def live_nodes(run: RunDirectory) -> int:
    """Returns the number of nodes that work on the run. Raises UserError if the run is not live."""
    attempt = run.attempts / f"{run.newest_attempt():03d}.json"
    if not is_live(run) or not attempt.exists() or not attempt.stat().st_size:
        raise UserError(
            f"the run in {run.path} has no live workers",
            where="RUN",
            fix="name a live run; `python -m hpc_train status` lists yours",
        )
    return int(run.attempt_record(run.newest_attempt()).get("nodes", 1))


def _parser(command: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """Returns the parser of a command; its help begins with the first line of the command's docstring."""
    summary = (command.__doc__ or "").partition("\n")[0].replace("``", "")
    return OptionParser(prog=f"python -m hpc_train {command.__name__}", description=summary)


JOB_ID = re.compile(r"\d+(_\d+)?")


def refuse_unproven(item: RunHandle) -> None:
    """Raises UserError if a run of another user names a live process or job that is not proved to be the caller's.

    A process is proved by the lease of the run, in a file that the caller owns, or by its command line, which names
    the run directory. A job is proved by its user and its comment.
    """
    owner = foreign_owner(item.run)
    if owner is None:
        return
    if item.pid is not None and item.lives_here() and not _works_on(item.pid, item.run):
        raise _refusal(item.run, owner, f"process {item.pid}", f"kill {item.pid}")
    for job_id in _unproven_jobs(item):
        raise _refusal(item.run, owner, f"Slurm job {job_id}", f"scancel {job_id}")


def refuse_foreign_lease(run: RunDirectory) -> None:
    """Raises UserError if a run is another user's and the caller has no live process that works on it."""
    owner = foreign_owner(run)
    if owner is not None and _own_lease(run) is None:
        raise UserError(
            f"{run.path} belongs to {name_of_user(owner)}, and none of your processes works on it",
            where="RUN",
            fix=f"ask {name_of_user(owner)}, or name one of your runs",
        )


def _refusal(run: RunDirectory, owner: int, what: str, command: str) -> UserError:
    return UserError(
        f"{run.path} belongs to {name_of_user(owner)} and names {what}, which is not proved to be yours and to work on "
        "this run",
        where=str(run.path),
        fix=f"`{command}`, if you want to end it nevertheless",
    )


def _works_on(pid: int, run: RunDirectory) -> bool:
    """Returns whether a process is the caller's and works on ``run``."""
    process = Path(f"/proc/{pid}")
    try:
        if process.stat().st_uid != os.geteuid():
            return False
        words = process.joinpath("cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    is_controller = len(words) > 3 and words[2].endswith(b"/hpc_train/launch/executors/controller.py")
    if is_controller and words[3] in (os.fsencode(run.logs), os.fsencode(run.logs / "submitit")):  # before 0.9
        return True
    owner = _own_lease(run)
    return owner is not None and owner.pid == pid and owner.started == started(pid)


def _own_lease(run: RunDirectory) -> LockOwner | None:
    """Returns the process that has taken the lease of ``run`` last, if it is the caller's: the caller owns its file."""
    lock = newest_lock(lease_folder(run.path))
    if lock is None:
        return None
    try:
        status = lock.path.lstat()
    except OSError:
        return None
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
        return lock.owner()
    return None


def _unproven_jobs(item: RunHandle) -> list[str]:
    """Returns the jobs of ``item`` that Slurm may know and that are not jobs of the caller for this run."""
    ids = [job_id for job_id in item.job_ids if JOB_ID.fullmatch(job_id)]
    if len(ids) < len(item.job_ids):
        return [str(job_id) for job_id in item.job_ids]
    if not ids:
        return []
    selection = [f"--jobs={','.join(ids)}", *on_clusters(item.submission.get("clusters"))]
    present = ask(selection)
    of_caller = ask(["--me", *selection])
    if present is None or of_caller is None:
        return ids
    comments = [f"{COMMENT}{path}" for path in (item.run.path, item.run.path.parent)]
    unproven = []
    for job_id in ids:
        status = status_of(job_id, present)
        if status is None or not status.present:
            continue
        mine = status_of(job_id, of_caller)
        # the user's comment may follow
        if mine is None or not any(f"{mine.comment} ".startswith(f"{comment} ") for comment in comments):
            unproven.append(job_id)
    return unproven

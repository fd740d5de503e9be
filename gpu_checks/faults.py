"""Checks of what a run does when a worker dies, a kernel never ends, or a GPU reports an error."""

from __future__ import annotations

from functools import partial

from gpu_checks.check import Probe
from gpu_checks.commands import Run, at_once, largest_difference, train
from gpu_checks.models import disturbed
from hpc_train.elastic.hangs import read_collectives
from hpc_train.run.exits import Failure

SAME = 1e-5  # on a GPU, where sums by atomic additions differ from run to run
SAVES = ("checkpoint.every=2", "train.steps=8")


def killed_worker(probe: Probe) -> None:
    """A worker that is killed restarts from its checkpoint, and the losses are those of a run that nobody disturbs."""
    once, never = probe.folder / "once", probe.folder / "never"
    never.touch()
    killed, undisturbed = at_once(
        partial(train, probe, "killed", *disturbed("kill", once, call=6), *SAVES),
        partial(train, probe, "undisturbed", *disturbed("kill", never, call=6), *SAVES),
    )
    probe.equal("failures", [event["class"] for event in killed.events("worker_failed")], [Failure.KILLED.value])
    difference = largest_difference(killed.losses(), undisturbed.losses())
    probe.within("losses, killed against undisturbed", difference, high=SAME if probe.on_gpu else 0)
    resumed = killed.events("resumed")
    # on a GPU a checkpoint is written in the background, and that of step 4 may not be complete at step 6
    steps = [event["step"] for event in resumed]
    probe.expect(
        "step that it resumes from", steps, "4, or 2 on a GPU", steps in ([4], [2]) if probe.on_gpu else steps == [4]
    )
    _check_first_step(probe, killed, [step + 1 for step in steps])
    moment = float(once.read_text())
    seconds = (resumed[0]["time"] if resumed else float("nan")) - moment
    probe.within("from the kill to the restored checkpoint", seconds, high=30, unit="s")
    probe.note("from the kill to the next step, s", _next_step(killed, moment) - moment)


def _check_first_step(probe: Probe, run: Run, steps: list[int]) -> None:
    """The event of the first step after a restart, in a run that compiles nothing."""
    events = run.events("first_step")
    probe.equal("steps of the events first_step", [event["step"] for event in events], steps)
    for event in events:
        content = {name: event[name] for name in ("compiled", "reused", "cache_loaded")}
        probe.equal("what it has compiled", content, {"compiled": 0, "reused": 0, "cache_loaded": False})
        probe.within("seconds of the first step", float(event["seconds"]), 0.0, 30, unit="s")


def _next_step(run: Run, moment: float) -> float:
    return float(min(line["time"] for line in run.metrics() if line["time"] > moment))


def hang(probe: Probe) -> None:
    """A step of seconds is survived. A kernel that never ends is found, its evidence is kept, and the run goes on."""
    # the bound with `auto` is 120 s on GPUs; a step takes milliseconds here
    bound, seconds = (12, 6.0) if probe.on_gpu else (4, 1.0)
    # one rank waits in a collective behind the kernel; on the CPU a second rank does
    ranks = [] if probe.on_gpu else ["+strategy=dp"]
    run = train(
        probe, "run", *disturbed("stall, then hang", probe.folder / "once", call=8, seconds=seconds),
        "train.steps=16", "checkpoint.every=2", f"elastic.hang_timeout_s={bound}", *ranks, ranks=1 + len(ranks),
    )  # fmt: skip
    probe.within("the longest step", max(line["step_s"] for line in run.metrics()), low=seconds / 2, unit="s")
    probe.note("slow steps", len(run.events("slow_step")))
    found = run.events("hang_detected")
    probe.equal("hangs found", len(found), 1)
    probe.equal("attempts that failed", len(run.events("worker_failed")), 1)
    probe.equal("last step", max(run.losses()), 16)
    if not found:
        return
    probe.within("seconds without a sign of life", float(found[0]["seconds"]), high=2 * bound + 10, unit="s")
    stacks = sorted((run.path / "logs" / "stacks").glob("hang-*.txt"))
    text = "".join(path.read_text() for path in stacks)
    where = "trainer.py" if probe.on_gpu else "models.py"  # the host is ahead of the GPU, and waits for a result
    probe.expect("the stacks show where it waits", where in text, f"a line of {where}", where in text)
    files = sorted((run.path / "logs" / "stacks").glob("collectives-*.json"))
    probe.within("dumps of the flight recorder in the run directory", len(files), low=1)
    waiting = [name for file in files for name in _waiting(file.read_bytes(), on_host=not probe.on_gpu)]
    probe.expect("the collectives in them that wait", waiting, "all_reduce", "all_reduce" in waiting)


def _waiting(dump: bytes, on_host: bool) -> list[str]:
    """Returns the operations that have not ended, of gloo or of the device."""
    return [one.operation for one in read_collectives(dump) if not one.is_finished and one.is_on_host == on_host]


def device_errors(probe: Probe) -> None:
    """An assertion in a kernel and an uncorrectable memory error each have a class of their own and are reported."""
    cases = {"lose memory": ("uncorrectable ECC", Failure.DEVICE, "device")}
    if probe.on_gpu:
        cases["read out of bounds"] = ("device-side assert", Failure.KERNEL, "kernel")
    started = [
        partial(train, probe, name, *disturbed(how, probe.folder / f"{name}-once"), "train.steps=6", ends=None)
        for how, (_, _, name) in cases.items()
    ]
    for (how, (words, wanted, _)), run in zip(cases.items(), at_once(*started), strict=True):
        found = [event["class"] for event in run.events("worker_failed")]
        probe.equal(f"{how}: class", found[:1], [wanted.value])
        printed = run.output + run.logs()
        probe.expect(f"{how}: what is printed", words in printed, f"names {words!r}", words in printed)
        probe.note(f"{how}: exit code, attempts that failed", [run.code, len(found)])


def out_of_memory(probe: Probe) -> None:
    """Too large a micro-batch ends the run with a message that names the largest part and what would help."""
    huge = ["model=gpt_124m", "data.vocab_size=50257", "data.sequence_length=2048", "batch.global_size=4096"]
    run = train(probe, "run", *huge, "batch.micro_size=4096", "data.samples=8192", ends=None, timeout=100)
    failed = run.events("worker_failed", "failed")
    classes = [event["class"] for event in failed if "class" in event]
    probe.equal("class", classes[:1], [Failure.OUT_OF_MEMORY.value])
    printed = run.output + run.logs()
    for words in ("out of memory on rank 0", "mostly", "batch.micro_size=2048"):
        probe.expect("the message", words in printed, f"has {words!r}", words in printed)
    probe.expect("exit code", run.code, "not 0", run.code != 0)

"""What the agent does with the reports of GPUs: evidence, the class of a failure, free memory, and idle GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_train.elastic import gpu_errors
from hpc_train.elastic.decision import WorkerFailure
from hpc_train.elastic.gpu_errors import GpuErrors, IdleGpus
from hpc_train.elastic.rendezvous.messages import NodeReport, report_message, report_of
from hpc_train.machine.health.finding import OK, Finding
from hpc_train.machine.health.gpu_health import GpuProcess, GpuState, judge
from hpc_train.machine.health.health_check import NodeHealth
from hpc_train.machine.health.kernel_log import Line, find_errors
from hpc_train.machine.network.facts import Gpu, NodeFacts
from hpc_train.run.directory import RunDirectory
from hpc_train.run.event_log import EventLog
from hpc_train.run.exits import Exit, Failure
from hpc_train.run.requests import StopRequests

FIRST, SECOND, FOREIGN = "0000:18:00.0", "0000:3a:00.0", "0000:5d:00.0"
FACTS = NodeFacts("n1", (Gpu(0, FIRST), Gpu(1, SECOND), Gpu(2, FOREIGN)), visible=("0", "1"))
UNREAD = Finding("kernel log", OK, "not known: this user may read neither /dev/kmsg nor the journal")
ILLEGAL = "CUDA error: an illegal memory access was encountered"
OUT_OF_MEMORY = "out of memory on rank 1, which had used 70 GiB of GPU memory: Tried to allocate 2.00 GiB."
GIB = 1 << 30


def failure(kind: Failure, message: str = ILLEGAL) -> WorkerFailure:
    return WorkerFailure(1, kind, message, message, 0.0)


def states(**second: object) -> tuple[GpuState, ...]:
    """Three GPUs, of which ranks use the first two; ``second`` describes the second one."""
    return (GpuState(0, FIRST), GpuState(1, SECOND, **second), GpuState(2, FOREIGN))  # type: ignore[arg-type]


def xid(pci: str, code: int, age: float) -> Line:
    return Line(f"NVRM: Xid (PCI:{pci}): {code}, pid=1", age)


def health(gpus: tuple[GpuState, ...], *log: Line) -> NodeHealth:
    return NodeHealth("n1", (*judge(gpus, "n1"), UNREAD), gpus, find_errors(log))


def examined(failed: WorkerFailure, found: NodeHealth, facts: NodeFacts = FACTS) -> WorkerFailure:
    return GpuErrors(facts, 2, check=lambda node: found).examine(failed, 1, attempt_s=60.0)


@pytest.mark.parametrize(
    ("kind", "message", "found", "expected"),
    [
        (Failure.KERNEL, ILLEGAL, health(states()), Failure.KERNEL),
        (Failure.KERNEL, ILLEGAL, health(states(uncorrected=2)), Failure.DEVICE),
        (Failure.KERNEL, ILLEGAL, health(states(rows_failed=True)), Failure.DEVICE),
        (Failure.KERNEL, ILLEGAL, health(states(recovery="Reset")), Failure.DEVICE),
        (Failure.KERNEL, ILLEGAL, health(states(rows_pending=True)), Failure.KERNEL),  # a warning
        (Failure.KERNEL, ILLEGAL, health(states(slowdowns=("it is warm",))), Failure.KERNEL),
        (Failure.KERNEL, ILLEGAL, health(states(), xid("0000:3a:00", 79, 5.0)), Failure.DEVICE),
        (Failure.KERNEL, ILLEGAL, health(states(), xid("0000:3a:00", 31, 5.0)), Failure.KERNEL),
        (Failure.KERNEL, ILLEGAL, health(states(), xid("0000:3a:00", 79, 3600.0)), Failure.KERNEL),
        (Failure.KERNEL, ILLEGAL, health(states(), xid("0000:5d:00", 79, 5.0)), Failure.KERNEL),
        (Failure.HANG, "no sign of life for 60 s", health(states(recovery="Reboot")), Failure.DEVICE),
        (Failure.USER_ERROR, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", health(states(uncorrected=1)), Failure.DEVICE),
        (Failure.OUT_OF_MEMORY, OUT_OF_MEMORY, health(states(uncorrected=1)), Failure.OUT_OF_MEMORY),
        (Failure.DEVICE, "CUDA error: uncorrectable ECC error", health(states(uncorrected=1)), Failure.DEVICE),
    ],
)
def test_a_defect_that_the_gpus_report_is_the_nodes_fault(
    kind: Failure, message: str, found: NodeHealth, expected: Failure
) -> None:
    after = examined(failure(kind, message), found)
    assert after.failure is expected
    assert after.gpus[-1] == f"kernel log: {UNREAD.text}", "the evidence is recorded for every class"
    if expected is not kind:
        assert after.message.startswith(f"{message} ({kind}), and a GPU of the node is defective: ")


def test_a_gpu_of_another_job_is_not_to_blame() -> None:
    gpus = (*states()[:2], GpuState(2, FOREIGN, uncorrected=9))
    after = examined(failure(Failure.KERNEL), health(gpus))
    assert after.failure is Failure.KERNEL and not any("GPU2" in line for line in after.gpus)


def test_only_errors_of_gpus_are_examined() -> None:
    def never(node: str) -> NodeHealth:
        raise AssertionError("the GPUs are asked")

    for kind, message, facts in (
        (Failure.USER_ERROR, "ValueError: too wide", FACTS),
        (Failure.USER_ERROR, "expected all tensors on one device, but found cuda:0 and cpu", FACTS),
        (Failure.OUT_OF_MEMORY, "killed by SIGKILL: out of host memory according to the kernel", FACTS),
        (Failure.COMMUNICATION, "Connection closed by peer", FACTS),
        (Failure.KERNEL, ILLEGAL, NodeFacts("n1")),  # on the CPU
    ):
        failed = failure(kind, message)
        assert GpuErrors(facts, 2, check=never).examine(failed, 1, 60.0) is failed


def test_the_evidence_reaches_the_server() -> None:
    report = NodeReport(Exit.FAILED, examined(failure(Failure.KERNEL), health(states(uncorrected=2))), 7)
    assert report.failure is not None and len(report.failure.gpus) == 2
    assert report_of(json.loads(json.dumps(report_message(3, report)))) == report
    wrong = report_message(3, report) | {"failure": report_message(3, report)["failure"] | {"gpus": [3]}}
    with pytest.raises(TypeError):
        report_of(wrong)


def test_memory_that_other_processes_use_is_named() -> None:
    held = states(memory_used=40 * GIB, processes=(GpuProcess(812, "python3", 40 * GIB),))
    after = examined(failure(Failure.OUT_OF_MEMORY, OUT_OF_MEMORY), health(held))
    assert after.message == (f"{OUT_OF_MEMORY}; GPU1 ({SECOND}): 1 other processes use it: python3 (pid 812, 40 GiB)")
    hidden = examined(failure(Failure.OUT_OF_MEMORY, OUT_OF_MEMORY), health(states(memory_used=40 * GIB)))
    assert hidden.message.endswith("40 GiB of its memory are in use without a visible process")
    other = (GpuState(0, FIRST, memory_used=40 * GIB), *states(memory_used=GIB)[1:])
    assert examined(failure(Failure.OUT_OF_MEMORY, OUT_OF_MEMORY), health(other)).message == OUT_OF_MEMORY


class Waiting:
    """A node whose rank 1 has run out of memory, and the readings of its GPUs after that."""

    def __init__(self, folder: Path, readings: Iterator[tuple[GpuState, ...]], facts: NodeFacts = FACTS) -> None:
        self.run = RunDirectory(folder)
        self.run.create()
        self.ticks = 0
        self.stop = StopRequests()
        self.errors = GpuErrors(facts, 2, check=lambda node: health(states()), states=lambda: next(readings))

    def fail(self) -> None:
        self.errors.examine(failure(Failure.OUT_OF_MEMORY, OUT_OF_MEMORY), 1, 60.0)

    def wait(self) -> list[bool]:
        """Waits before the next attempt; returns for each wait so far whether the memory came free."""
        self.errors.wait_for_memory(EventLog.open(self.run, "agent-n1", 1), self._tick, self.stop)
        return [event["free"] for event in self.run.read_events()]

    def _tick(self) -> None:
        self.ticks += 1


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_errors, "POLL_S", 0.0)


def test_the_next_attempt_waits_until_the_memory_is_free(tmp_path: Path, fast: None) -> None:
    held, foreign = states(memory_used=40 * GIB), (*states()[:2], GpuState(2, FOREIGN, memory_used=40 * GIB))
    case = Waiting(tmp_path, iter([held, held, foreign]))
    assert case.wait() == [] and case.ticks == 0, "only after an attempt that ran out of memory"
    case.fail()
    assert case.wait() == [True] and case.ticks == 2 * gpu_errors.TICKS
    assert case.wait() == [True], "once"


def test_the_wait_is_bounded_and_ends_with_a_stop(tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    held = states(memory_used=40 * GIB)
    monkeypatch.setattr(gpu_errors, "MEMORY_S", 0.05)
    case = Waiting(tmp_path / "bounded", iter(lambda: held, None))
    case.fail()
    assert case.wait() == [False]
    (event,) = case.run.read_events()
    assert event["message"].endswith(f"40 GiB of GPU1 ({SECOND}) are in use")
    monkeypatch.setattr(gpu_errors, "MEMORY_S", 1e9)
    case = Waiting(tmp_path / "stopped", iter(lambda: held, None))
    case.fail()
    case.stop.request("SIGUSR2")
    assert case.wait() == [False]


def test_a_slice_is_waited_for_and_not_its_gpu(tmp_path: Path, fast: None) -> None:
    """Other jobs use the rest of the GPU, and its other slices."""
    gpu = Gpu(0, SECOND, uuid="GPU-1", slices=("MIG-1", "MIG-2"))
    held, free = (
        states(memory_used=40 * GIB, slices=("MIG-1", "MIG-2"), slices_used=(own, 9 * GIB)) for own in (8 * GIB, GIB)
    )
    case = Waiting(tmp_path, iter([held, held, free]), NodeFacts("n1", (gpu,), visible=("MIG-1",)))
    case.fail()
    assert case.wait() == [True]
    assert case.ticks == 2 * gpu_errors.TICKS


def test_a_slice_that_stays_in_use_is_named(tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_errors, "MEMORY_S", 0.05)
    gpu = Gpu(0, SECOND, uuid="GPU-1", slices=("MIG-1",))
    held = states(slices=("MIG-1",), slices_used=(8 * GIB,))
    case = Waiting(tmp_path, iter(lambda: held, None), NodeFacts("n1", (gpu,), visible=("MIG-1",)))
    case.fail()
    assert case.wait() == [False]
    (event,) = case.run.read_events()
    assert event["message"].endswith("8 GiB of MIG-1 are in use")


def test_gpus_are_told_when_they_were_idle_at_every_look_for_the_time() -> None:
    told: list[tuple[float, list[str]]] = []
    idle: list[bool] = []

    def states() -> tuple[GpuState, ...]:
        return tuple(GpuState(index, f"0000:0{index}:00.0", idle=one) for index, one in enumerate(idle))

    own = ["0000:00:00.0", "0000:01:00.0"]  # the third GPU belongs to another job
    gpus = IdleGpus(own, 120.0, lambda minutes, names: told.append((minutes, names)), states)
    looks = [
        (0, "TTT"),
        (60, "TFT"),
        (119, "TTT"),
        (120, "TTT"),
        (180, "TTT"),
        (240, "TTT"),
        (300, "FFT"),
        (360, "TTT"),
    ]
    for now, shown in looks:
        idle[:] = [letter == "T" for letter in shown]
        gpus.look(float(now))
    first, second = "GPU0 (0000:00:00.0)", "GPU1 (0000:01:00.0)"
    assert told == [(2.0, [first]), (4.0, [first, second])]
    for now in (420, 480):
        gpus.look(float(now))
    assert told[2:] == [(2.0, [first, second])], "told again after they had worked"

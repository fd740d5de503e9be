"""The class of a failure, from an exception or from what the kernel says of a dead process; and the log of workers."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from hpc_train.checkpoint.writer import SaveFailed
from hpc_train.data.loader import begun
from hpc_train.elastic.decision import ended_without_report, is_secondary
from hpc_train.elastic.worker_process import _failure, explained
from hpc_train.elastic.workers import RETAINED_ATTEMPTS, TAIL_LINES, WorkerLog, class_of_end, prune_logs
from hpc_train.errors import UserError
from hpc_train.machine.environment import refuse_loopback_down, refuse_unknown_interface, refuse_unreadable_sizes
from hpc_train.machine.kernel_counters import OomKills
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import FILE_SYSTEM, HOST_MEMORY, Failure, advice_for, classify
from hpc_train.run.file_writer import FileWriter
from hpc_train.train.saving import TRANSIENT


def semaphore_failure() -> str:
    """Returns the message if the loader cannot create a semaphore for its processes."""

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError) as error:
        begun(cast("Any", Loader()))
    return str(error.value)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (UserError("no data", where="data.path", fix="another"), Failure.REFUSED),
        (MemoryError(), Failure.OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), Failure.OUT_OF_MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), Failure.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "the checkpoint needs 3 GB, 1 GB free"), Failure.DISK_FULL),
        (OSError(errno.EDQUOT, "quota"), Failure.DISK_FULL),
        (RuntimeError("unable to write to file </torch_1_2>: No space left on device (28)"), Failure.DISK_FULL),
        *((OSError(code, os.strerror(code), "/scratch/x"), Failure.FILE_SYSTEM) for code in FILE_SYSTEM),
        (SaveFailed(f"rank 1: {OSError(errno.EIO, os.strerror(errno.EIO))!r}", {}), Failure.FILE_SYSTEM),
        (OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN)), Failure.USER_ERROR),  # a socket
        (FileNotFoundError(errno.ENOENT, "no such file", "/data/x"), Failure.USER_ERROR),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), Failure.KILLED),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), Failure.COMMUNICATION),
        (FloatingPointError("diverged"), Failure.NAN),
        (ArithmeticError("a sum"), Failure.USER_ERROR),
    ],
)
def test_exceptions(error: Exception, failure: Failure) -> None:
    assert classify(error) is failure


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ESTALE, errno.EKEYEXPIRED])
def test_a_file_of_the_run_that_is_away_is_a_fault_of_the_file_system(code: int) -> None:
    """A mount is missing for a moment, or a ticket has expired. Other files are missing by the user's mistake."""
    run = Path("/scratch/run")

    def of(name: str) -> Failure:
        return classify(OSError(code, os.strerror(code), name), run)

    assert {of("/scratch/run"), of("/scratch/run/config.yaml")} == {Failure.FILE_SYSTEM}
    assert of("/scratch/run/checkpoints/step-00000005/0.distcp") is Failure.FILE_SYSTEM
    expected = Failure.FILE_SYSTEM if code in FILE_SYSTEM else Failure.USER_ERROR
    assert {of("/data/x"), of("/scratch/run/samples/1.png"), of("/scratch/run2/config.yaml")} == {expected}
    assert code in TRANSIENT, "the last save is tried again"


DEVICE, KERNEL, OUT_OF_MEMORY = Failure.DEVICE, Failure.KERNEL, Failure.OUT_OF_MEMORY


class AcceleratorError(RuntimeError):
    """As torch raises it on a GPU: from torch 2.8 on with the number of the CUDA error."""

    def __init__(self, message: str, error_code: int | None = None) -> None:
        super().__init__(message + HOW_TO_DEBUG)
        self.error_code = error_code


class DistBackendError(RuntimeError):
    """As torch raises it for NCCL."""


HOW_TO_DEBUG = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
UNHANDLED = f"{NCCL}ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
WATCHDOG = (
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with exception: CUDA error: "
)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (AcceleratorError("CUDA error: uncorrectable ECC error encountered"), Failure.DEVICE),
        (AcceleratorError("CUDA error: some words of a later version", 214), Failure.DEVICE),
        (AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution"), Failure.DEVICE),
        (AcceleratorError("CUDA error: unspecified launch failure", 719), Failure.KERNEL),
        (AcceleratorError("CUDA error: all CUDA-capable devices are busy or unavailable", 46), Failure.DEVICE),
        (AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable", 46), Failure.DEVICE),
        (AcceleratorError("CUDA error: no CUDA-capable device is detected", 100), Failure.DEVICE),
        (AcceleratorError("CUDA error: invalid device ordinal", 101), Failure.DEVICE),
        (AcceleratorError("CUDA error: hardware stack error", 714), Failure.DEVICE),
        (AcceleratorError("CUDA error: system not yet initialized", 802), Failure.DEVICE),
        (AcceleratorError("CUDA error: unknown error", 999), Failure.DEVICE),
        (RuntimeError("No CUDA GPUs are available"), Failure.DEVICE),
        (RuntimeError("No HIP GPUs are available"), Failure.DEVICE),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device"),
            Failure.REFUSED,
        ),
        (RuntimeError("HIP error: an illegal memory access was encountered"), Failure.KERNEL),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), Failure.OUT_OF_MEMORY),
        (RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu."), Failure.DEVICE),
        (RuntimeError("CUDA unknown error - this may be due to an incorrectly set up environment"), Failure.DEVICE),
        (RuntimeError("NVMLError_GpuIsLost: GPU is lost"), Failure.DEVICE),
        (RuntimeError("GPU 0000:3b:00.0 has fallen off the bus"), Failure.DEVICE),
        (DistBackendError(f"{UNHANDLED}Cuda failure 214 'uncorrectable ECC error encountered'"), Failure.DEVICE),
        (DistBackendError(f"{WATCHDOG}some words of a later version"), Failure.DEVICE),
        (
            DistBackendError(f"NCCL watchdog thread terminated with exception: CUDA error: what{HOW_TO_DEBUG}"),
            Failure.DEVICE,
        ),
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), Failure.KERNEL),
        (AcceleratorError("CUDA error: some words of a later version", 700), Failure.KERNEL),
        (AcceleratorError("CUDA error: device-side assert triggered", 710), Failure.KERNEL),
        (AcceleratorError("CUDA error: misaligned address", 716), Failure.KERNEL),
        (DistBackendError(f"{WATCHDOG}an illegal memory access was encountered"), Failure.KERNEL),
        (DistBackendError(f"{UNHANDLED}Cuda failure 700 'an illegal memory access was encountered'"), Failure.KERNEL),
        (AcceleratorError("CUDA error: out of memory", 2), Failure.OUT_OF_MEMORY),
        (DistBackendError(f"{UNHANDLED}Cuda failure 2 'out of memory'"), Failure.OUT_OF_MEMORY),
        (AcceleratorError("CUDA error: the launch timed out and was terminated", 702), Failure.KERNEL),
        (AcceleratorError("CUDA error: some words of a later version", 805), Failure.DEVICE),  # MPS
        (RuntimeError("CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server"), DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"), KERNEL),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), KERNEL),
        (RuntimeError("HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception."), KERNEL),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), Failure.COMMUNICATION),
        (AcceleratorError("CUDA error: invalid argument", 1), Failure.USER_ERROR),
        (AcceleratorError("CUDA error: initialization error", 3), Failure.USER_ERROR),  # of a forked loader
        (
            AcceleratorError("CUDA error: no kernel image is available for execution on the device", 209),
            Failure.REFUSED,
        ),
    ],
    ids=lambda value: str(value).replace(HOW_TO_DEBUG, "").splitlines()[-1],
)
def test_errors_of_a_gpu(error: Exception, failure: Failure) -> None:
    assert classify(error) is failure


def test_torch_has_the_error_that_is_looked_for() -> None:
    import torch

    error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    assert classify(error) is Failure.DEVICE
    assert classify(torch.OutOfMemoryError("CUDA out of memory.")) is Failure.OUT_OF_MEMORY


def test_a_watchdog_that_ends_the_process_for_an_error_of_its_gpu() -> None:
    output = [
        "step 7",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        f"  what():  {WATCHDOG}",
    ]
    output[-1] += "uncorrectable ECC error encountered"
    failure, message = class_of_end(-signal.SIGABRT, OomKills(), output=output)
    assert failure is Failure.DEVICE
    assert message.startswith("killed by SIGABRT: what():  [PG ID 0")
    assert not is_secondary(ended_without_report(3, -signal.SIGABRT, (failure, message), output, 0.0))
    found = class_of_end(-signal.SIGABRT, OomKills(), output=["NCCL error: remote process exited"])
    assert found == (Failure.KILLED, "killed by SIGABRT")
    assert is_secondary(ended_without_report(3, -signal.SIGABRT, found, [], 0.0))


@pytest.mark.parametrize(
    ("code", "killed", "failure", "words"),
    [
        (-signal.SIGKILL, OomKills(), Failure.KILLED, "killed by SIGKILL"),
        (-signal.SIGKILL, OomKills(group=1, node=1), Failure.OUT_OF_MEMORY, "out of host memory"),
        (-signal.SIGKILL, OomKills(node=1), Failure.KILLED, "the kernel killed a process for memory on this node"),
        (-signal.SIGSEGV, OomKills(), Failure.KILLED, "killed by SIGSEGV"),
        (0, OomKills(), Failure.EXITED, "exited early with code 0"),
    ],
)
def test_processes(code: int, killed: OomKills, failure: Failure, words: str) -> None:
    found, message = class_of_end(code, killed)
    assert found is failure
    assert words in message
    assert found is not Failure.OUT_OF_MEMORY or advice_for(found, message).startswith("set a larger cluster.mem")


def test_the_advice_for_a_worker_that_did_not_stop_in_time() -> None:
    """The agent has killed it; the advice for other kills would be wrong."""
    advice = advice_for(Failure.KILLED, "did not stop within 5 s of the request (elastic.stop_grace_s)")
    assert "increase elastic.stop_grace_s" in advice and "out of memory" not in advice


def test_a_worker_that_ends_with_its_warm_parent() -> None:
    assert class_of_end(255, OomKills(), with_warm_parent=True) == (
        Failure.KILLED,
        "killed by the kernel when the warm parent of the node's workers ended",
    )
    failure, message = class_of_end(255, OomKills(group=1), with_warm_parent=True)
    assert failure is Failure.KILLED
    assert message.endswith(f"ended: the warm parent was killed: {HOST_MEMORY} (limit of --mem or of a container)")


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        ("0::/slurm/job_7/step_0\n", "slurm/job_7/step_0/memory.events"),
        ("9:cpu:/a\n4:memory:/slurm/uid_1/job_7\n0::/\n", "memory/slurm/uid_1/job_7/memory.oom_control"),
    ],
)
def test_both_versions_of_control_groups(tmp_path: Path, membership: str, file: str) -> None:
    counters = tmp_path / "groups" / file
    counters.parent.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(membership)
    (tmp_path / "proc" / "vmstat").write_text("nr_free_pages 5\noom_kill 9\n")
    assert OomKills.now(tmp_path / "groups", tmp_path / "proc") == OomKills(0, 9)
    counters.write_text("oom 4\noom_kill 3\noom_group_kill 0\n")
    assert OomKills.now(tmp_path / "groups", tmp_path / "proc") - OomKills(1, 9) == OomKills(2, 0)


@pytest.mark.parametrize("exit_code", [-signal.SIGKILL, -signal.SIGXCPU])
def test_a_limit_of_cpu_time_is_named(exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (3, 3))
    failure, message = class_of_end(exit_code, OomKills())
    assert failure is Failure.KILLED
    assert message.endswith("a process may use 3 s of CPU time (ulimit -t)")
    assert "ulimit -t unlimited" in advice_for(failure, message)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_12_34'", "batch.loader_workers=0"),
        (semaphore_failure(), "batch.loader_workers=0"),
        ("unable to write to file </torch_12_34_0>: No space left on device (28)", "batch.loader_workers=0"),
        ("rank 0: [Errno 28] No space left on device: '/scratch/run'", "set another run.root"),
    ],
)
def test_the_advice_for_a_full_disk_fits_the_disk(message: str, advice: str) -> None:
    assert advice in advice_for(Failure.DISK_FULL, message)


def test_a_loopback_interface_that_is_down_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_loopback_down()
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": SimpleNamespace(isup=False)})
    with pytest.raises(UserError, match="loopback interface lo"):
        refuse_loopback_down()


def test_an_interface_that_no_node_has_is_refused() -> None:
    refuse_unknown_interface({"GLOO_SOCKET_IFNAME": "lo"})
    with pytest.raises(UserError, match="has no network interface nope"):
        refuse_unknown_interface({"GLOO_SOCKET_IFNAME": "lo,nope"})


@pytest.mark.parametrize(
    ("name", "value", "raised"),
    [
        ("TORCH_LOGS", "junk", 'raise ValueError("Invalid log settings: junk, must be a list")'),
        ("TORCH_LOGS_OUT", "/no/file", 'open("/no/file")'),
        ("PYTORCH_JIT", "x", 'raise ValueError("Unknown setting of PYTORCH_JIT. Try using 0 or 1.")'),
        ("TORCH_DIST_INIT_BARRIER", "x", 'int(__import__("os").environ["TORCH_DIST_INIT_BARRIER"])'),
    ],
)
def test_the_variable_that_torch_rejects_is_named(
    name: str, value: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"imports_{name}.py").write_text(f"{raised}\n")
    from hpc_train.elastic.warm_parent.imports import import_modules  # it stops the garbage collector

    gc.enable()
    error = import_modules(f"imports_{name}")
    assert error is not None
    assert f"torch cannot use {name}={value}: " in str(explained(error))
    monkeypatch.setenv(name, "another value")
    monkeypatch.delenv("PYTORCH_JIT", raising=False)
    assert "TORCH_DIST_INIT" in name or explained(error) is error


def test_sizes_at_which_torch_aborts_are_refused() -> None:
    refuse_unreadable_sizes({"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": " 10"})
    with pytest.raises(UserError, match="TORCH_FR_BUFFER_SIZE=many is not an integer"):
        refuse_unreadable_sizes({"TORCH_FR_BUFFER_SIZE": "many"})


def test_what_a_worker_reports_can_be_sent_and_printed() -> None:
    """The name of a file that is not UTF-8 has halves of surrogate pairs."""
    report = _failure(FileNotFoundError(errno.ENOENT, "No such file", os.fsdecode(b"caf\xe9.jpg")), Path("/run"))
    assert r"caf\udce9.jpg" in report["message"] and "caf" in report["traceback"]
    for text in (report["message"], report["traceback"]):
        assert text.encode().decode() == text
    assert _failure(SystemExit(3), Path("/run"))["message"] == "the code called exit(3)"


def lines_of(path: Path) -> list[str]:
    """Without the times."""
    return [re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ", "", line) for line in path.read_text().splitlines()]


def test_lines_of_ranks_are_whole_and_prefixed(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "node.log", FileWriter("the output"))
    log.write(0, b"a be")
    log.write(1, b"other\n")
    log.write(0, b"ginning\nunfinished")
    assert log.tail(0) == ["a beginning", "unfinished"]
    log.close()
    assert lines_of(log.path) == ["[1] other", "[0] a beginning", "[0] unfinished"]


def test_a_full_log_says_so_and_keeps_the_last_lines(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "node.log", FileWriter("the output"), limit_bytes=1000)
    for number in range(500):
        log.write(number % 2, b"line %d\n" % number)
    log.close()
    lines = lines_of(log.path)
    assert lines[0] == "[0] line 0"
    assert sum("has reached its limit of 1000 bytes" in line for line in lines) == 1
    assert lines[-1] == "[1] line 499"
    assert len(lines) < 1000 // 30 + 2 * TAIL_LINES + 3


def test_a_line_without_end_does_not_grow_in_memory(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "node.log", FileWriter("the output"))
    for _ in range(100):
        log.write(0, b"x" * 10_000)
    assert len(log.tail(0)[-1]) < 80_000
    log.close()


def test_the_stacks_of_old_attempts_are_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    names = [
        "stacks/hang-n-1-{0:03d}.txt",
        "stacks/slow-n-{0:03d}.txt",
        "stacks/collectives-{0:03d}-rank-0001.json",
        "stacks/nccl-{0:03d}-rank-1",
        "nccl/{0:03d}-rank-0001.log",
    ]
    made = [run.logs / name.format(number) for number in range(15) for name in names]
    answers = [run.logs / "stacks" / name for name in ("request", "001-n1.txt", "002-n-001.txt")]
    for path in [*made, *answers]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    prune_logs(run, 14)
    kept = [path for path in made if path.exists()]
    assert kept == made[-5 * RETAINED_ATTEMPTS :]
    assert all(path.exists() for path in answers)
    prune_logs(RunDirectory(tmp_path / "empty"), 14)

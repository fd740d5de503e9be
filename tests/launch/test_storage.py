"""Room for checkpoints, and whether the nodes see the run directory: mount tables and quotas as systems print them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_train.config.schema import CheckpointConfig, ClusterConfig, GPTConfig, OptimConfig, TargetConfig, ViTConfig
from hpc_train.errors import UserError
from hpc_train.launch import dry_run, storage
from hpc_train.launch.storage import check_room, check_shared
from hpc_train.layout.memory import state_bytes
from hpc_train.layout.sizes import parameter_count
from hpc_train.machine.storage import FileSystem, Room, file_system_of, is_exported, room_in
from hpc_train.models.build import build_model
from hpc_train.schedulers.slurm.records import NodeRecord
from hpc_train.units import format_bytes
from tests.launch.jobs import make_job

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 27 0:40 / /tmp rw - tmpfs tmpfs rw
40 27 0:50 / /scratch rw shared:9 master:2 - lustre 10.0.0.1@o2ib:/scratch rw,flock
41 27 0:51 / /my\\040data rw - nfs4 server:/data rw
"""
NODES = NodeRecord.read_all(
    "NodeName=n7 Arch=x86_64 NodeAddr=10.0.0.7 NodeHostName=n7 BootTime=2020-01-31T12:00:00 State=IDLE"
)
GIGABYTE = 10**9
TMPFS, DISK = FileSystem(Path("/run"), "tmpfs", "tmpfs"), FileSystem(Path("/"), "xfs", "/dev/sda1")


@pytest.mark.parametrize(
    "model",
    [
        GPTConfig(vocab_size=11, n_layers=3, dim=16, n_heads=4, n_kv_heads=2, ffn_dim=24),
        GPTConfig(vocab_size=11, n_layers=1, dim=16, n_heads=4, n_kv_heads=4, ffn_dim=24, tied_embeddings=True),
        ViTConfig(image_size=32, patch_size=8, channels=3, n_classes=7, n_layers=2, dim=16, n_heads=2, mlp_dim=24),
    ],
)
def test_parameters_are_counted_as_torch_counts_them(model: GPTConfig | ViTConfig) -> None:
    built = build_model(model, 0)
    assert isinstance(built, torch.nn.Module)
    assert parameter_count(model) == sum(parameter.numel() for parameter in built.parameters())


def test_the_optimizer_the_average_and_the_precision_count(tmp_path: Path) -> None:
    config = make_job(tmp_path / "sweep").config
    count = parameter_count(config.model)
    assert count is not None
    assert state_bytes(config) == count * 4 * 3
    config.strategy.compression = "topk"
    assert (state_bytes(config), state_bytes(config, replicas=4)) == (count * 4 * 3, count * 4 * (3 + 4))
    config.optim, config.precision.name = OptimConfig(name="sgd", momentum=0.0), "fp64"
    assert state_bytes(config) == count * 8
    config.hooks = {"ema": TargetConfig("hpc_train.train.hooks.ema.EMA")}
    assert state_bytes(config) == count * 16


@pytest.mark.parametrize(
    ("asked", "gpus", "shown"), [("auto", 0, False), ("auto", 2, True), (True, 0, True), (False, 2, False)]
)
def test_a_dry_run_shows_the_host_memory_of_asynchronous_saves(
    tmp_path: Path, asked: bool | str, gpus: int, shown: bool
) -> None:
    job = make_job(tmp_path / "sweep", cluster=ClusterConfig(kind="local", cpu_workers=2, nodes="2"), gpus=gpus)
    job.config.checkpoint.asynchronous = asked
    size = format_bytes((state_bytes(job.config, job.layout.dp) or 0) / 2)
    line = f"  host memory: saves copy about {size} per node (checkpoint.asynchronous={str(asked).lower()})"
    assert [text for text in dry_run._memory(job) if "host memory" in text] == ([line] if shown else [])


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [("/home/me", "ext4", False), ("/tmp/x", "tmpfs", False), ("/scratch/me/x", "lustre", True),
     ("/my data/x", "nfs4", True)],
)  # fmt: skip
def test_what_a_directory_lies_on(path: str, kind: str, shared: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = file_system_of(Path(path), mounts)
    assert found is not None
    assert found.kind == kind
    assert found.of_one_host is not shared


def test_a_directory_that_this_host_exports(tmp_path: Path) -> None:
    exports = tmp_path / "etab"
    exports.write_text(f"{tmp_path}/home\t*(rw,sync,wdelay)\n")
    assert is_exported(tmp_path / "home" / "me", exports)
    assert not is_exported(tmp_path / "homes", exports)
    assert not is_exported(tmp_path, tmp_path / "missing")


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("lustre", "/scratch  900  0  1000  -  7  0  10  -\n", (100 * 1024, 3)),
        ("lustre", "/scratch\n 1200*  1000  1100  2d  7  0  0  -\n", (0, None)),
        ("xfs", "Disk quotas for user me (uid 7):\n     Filesystem  blocks quota limit grace files quota limit grace\n"
                "     /dev/sda1   300   400     0     0    12     0     0     0\n", (100 * 1024, None)),
        ("xfs", "Disk quotas for user me (uid 7): none\n", None),
        ("lustre", "", None),
    ],
)  # fmt: skip
def test_quotas(
    kind: str, said: str, expected: tuple[int, int | None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FileSystem(Path("/scratch"), kind, "/dev/sda1")
    monkeypatch.setattr("hpc_train.machine.storage.file_system_of", lambda path: system)
    quota = [(room.free, room.inodes) for room in room_in(tmp_path / "not" / "there", lambda _, timeout_s: said)[1:]]
    assert quota == ([expected] if expected else [])


def test_checkpoints_that_do_not_fit_are_refused_with_the_number_that_does(tmp_path: Path) -> None:
    job = make_job(tmp_path / "sweep")
    job.config.model = GPTConfig(vocab_size=32000, n_layers=32, dim=4096, n_heads=32, n_kv_heads=32, ffn_dim=11008)
    job.config.checkpoint = CheckpointConfig(keep=4)
    with pytest.raises(UserError) as refused:  # 6.7 billion parameters, 12 bytes each, and 2 % for the rest
        check_room([job], [Room(300 * GIGABYTE, None, "your quota")])
    assert refused.value.what == "the checkpoints need 384 GiB, but 279 GiB are free (your quota)"
    assert refused.value.fix.startswith("checkpoint.keep=2 would fit")
    (line,) = check_room([job], [Room(500 * GIGABYTE, 1000, "your quota")])
    assert "up to 384 GiB" in line
    with pytest.raises(UserError, match="89 files, but only 88 more can be created"):
        check_room([job], [Room(500 * GIGABYTE, 88, "your quota")])
    job.config.checkpoint.every = "0"  # one at the end
    check_room([job], [Room(83 * GIGABYTE, None, "the file system")])


def test_a_run_directory_that_only_this_machine_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="such as n7"):
        check_shared(Path("/run/user/7"), TMPFS, lambda: NODES)
    with pytest.raises(UserError, match="such as n7"):
        check_shared(Path("/tmp/me"), DISK, lambda: NODES)
    (note,) = check_shared(Path("/home/me"), DISK, lambda: NODES)
    assert note.startswith("note: /home/me is on a local file system of this machine (xfs on /)")
    assert check_shared(Path("/scratch"), FileSystem(Path("/scratch"), "lustre", "mds"), lambda: NODES) == []
    monkeypatch.setattr(storage.psutil, "boot_time", lambda: NODES[0].booted)  # a cluster on this machine
    assert check_shared(Path("/tmp/me"), DISK, lambda: NODES) == []

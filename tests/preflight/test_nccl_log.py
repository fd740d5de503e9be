"""What NCCL uses, read from lines as its versions print them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import pytest

from hpc_train.preflight.nccl_log import (
    NCCLLog,
    Transport,
    WarningCopier,
    copied_warnings,
    log_transport,
    logged_transport,
    parse_transport,
)

INFINIBAND = """\
n1:31842:31905 [0] NCCL INFO cudaDriverVersion 12080
NCCL version 2.27.3+cuda12.9
n1:31842:31905 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [2]mlx5_10:1/IB [RO]; OOB eth0:10.0.4.19<0>
n1:31842:31905 [0] NCCL INFO Initialized NET plugin IB
n1:31842:31905 [0] NCCL INFO Using network IB
n1:31842:31905 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:31842:31905 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
n1:31842:31905 [0] NCCL INFO Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0(1)/GDRDMA(PCI)/Shared
"""
STAGED = """\
n1:7:19 [0] NCCL INFO Using network IB
n1:7:19 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:7:19 [0] NCCL INFO Channel 01/0 : 7[7] -> 8[0] [send] via NET/IB/1
"""
SOCKETS = """\
n1:1482:1482 [0] NCCL INFO NCCL version 2.22.3+cuda12.5
n1:1482:1482 [0] NCCL INFO NET/IB : No device found.
n1:1482:1482 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
n1:1482:1482 [0] NCCL INFO NET/Socket : Using [0]eno1:172.22.116.89<0> [1]eno2:192.168.193.155<0>
n1:1482:1482 [0] NCCL INFO Using network Socket
n1:1482:1482 [0] NCCL INFO Channel 00/0 : 17[1] -> 0[0] [receive] via NET/Socket/0
"""
EFA = """\
[1,4]<stdout>:w-0:30:70 [4] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
[1,4]<stdout>:w-0:30:70 [4] NCCL INFO Using network AWS Libfabric
[1,4]<stdout>:w-0:30:70 [4] NCCL INFO Channel 03 : 4[901c0] -> 7[a01d0] via P2P/IPC/read
[1,6]<stdout>:w-0:33:73 [6] NCCL INFO Channel 03 : 15[a01d0] -> 6[a01c0] [receive] via NET/AWS Libfabric/3/GDRDMA
"""
OLD = """\
tesla:1481:2165 [3] NCCL INFO Channel 00 : 3[b1000] -> 4[18000] [send] via NET/Socket/0
tesla:1480:2169 [2] NCCL INFO Channel 00 : 2[af000] -> 1[1a000] via direct shared memory
tesla:1475:2146 [0] NCCL INFO Channel 00 : 0[18000] -> 1[1a000] via P2P/IPC
"""
BEFORE_IT_CONNECTS = """\
w:172:172 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
w:172:172 [0] NCCL INFO Using network Libfabric
"""
# RCCL 2.26 on InfiniBand, and 2.18 over TCP (ROCm/rccl issue 1026)
RCCL = """\
n1:927:927 [0] NCCL INFO RCCL version : 2.26.6-HEAD:f224e2c
HIP version  : 7.0.51831-a3e329ad8
n1:927:940 [0] NCCL INFO NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_ib1:1/IB [RO]; OOB eth0:10.215.224.34<0>
n1:927:940 [0] NCCL INFO Using network IB
n1:927:940 [0] NCCL INFO Channel 01/0 : 2[c9000] -> 0[c1000] via P2P/IPC comm 0x10a5a9f0 nRanks 08
n1:927:940 [0] NCCL INFO Channel 00/0 : 7[de000] -> 8[c1000] [send] via NET/IB/3/GDRDMA comm 0x95cdeb0 nRanks 16
"""
RCCL_SOCKETS = """\
RCCL version 2.18.3+hip6.0 HEAD:2f6d59e+
g1072:126:127 [0] NCCL INFO Channel 02/0 : 1[c6000] -> 4[c1000] [receive] via NET/Socket/1 comm 0x95cdeb0 nRanks 08
"""
ONE_NODE = "n1:7:19 [0] NCCL INFO Channel 00 : 0[0] -> 4[4] via SHM/direct/direct\n"


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        (INFINIBAND, Transport(("IB",), True, ("P2P",))),
        (STAGED, Transport(("IB",), False)),
        (SOCKETS, Transport(("Socket",), False)),
        (EFA, Transport(("AWS Libfabric",), True, ("P2P",))),
        (OLD, Transport(("Socket",), False, ("SHM", "P2P"))),
        (BEFORE_IT_CONNECTS, Transport(("Libfabric",))),
        (RCCL, Transport(("IB",), True, ("P2P",))),
        (RCCL_SOCKETS, Transport(("Socket",), False)),
        (ONE_NODE, Transport(inside=("SHM",))),
        ("", Transport()),
    ],
)
def test_a_log(log: str, transport: Transport) -> None:
    assert parse_transport(log) == transport
    assert parse_transport(log).over_sockets == ("Socket" in transport.networks)


def test_the_channels_tell_more_than_the_choice() -> None:
    """A communicator that was refused the card: chosen is IB, and TCP is what carries the data."""
    assert parse_transport(f"{INFINIBAND}{OLD}").networks == ("IB", "Socket")
    assert parse_transport("n1:7:19 [0] NCCL INFO Using network IB\n" + OLD).over_sockets


WARNING = "n1:7:19 [0] ib.cc:1 NCCL WARN NET/IB : Got completion from peer 1.2.3.4<4> with status=12\n"


def opened(log: NCCLLog) -> TextIO:
    """What NCCL does with the name in NCCL_DEBUG_FILE."""
    return Path(log.path).open("w", buffering=1)


def test_warnings_are_copied_to_the_log_of_the_node_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, kept = NCCLLog(), tmp_path / "nccl" / "log"
    copier = WarningCopier(log, kept)
    copier.copy()  # NCCL has not opened it
    with opened(log) as file:
        file.write(f"{INFINIBAND}\n{WARNING[:20]}")
        file.flush()
        copier.copy()
        assert capfd.readouterr().err == "" and not kept.exists()
        file.write(WARNING[20:])
        copier.copy()
        copier.copy()
    assert capfd.readouterr().err == WARNING
    assert kept.read_text() == f"{INFINIBAND}\n{WARNING}", "the process may be aborted before it could keep it"


def test_nccls_log_is_kept_after_a_failure_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log, kept = NCCLLog(), tmp_path / "nccl" / "log"
    with opened(log) as file:
        with pytest.raises(RuntimeError), copied_warnings(log, kept):
            file.write(WARNING)
            raise RuntimeError
        assert capfd.readouterr().err == WARNING and kept.read_text() == WARNING
        with copied_warnings(log, kept):
            pass
        assert not kept.exists()
    logged = logged_transport(log)
    assert logged == Transport(), "no line about transports"


def test_a_log_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # restores them at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert log_transport() is None
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    log = log_transport()
    assert log is not None and os.environ["NCCL_DEBUG_FILE"] == log.path

"""What Slurm's commands say, read from their text; sites that do not say everything."""

from __future__ import annotations

import getpass
import threading
from collections.abc import Sequence

import pytest

from hpc_train.schedulers.slurm.records import NodeRecord, gpus_of, seconds
from hpc_train.schedulers.slurm.site import (
    NodeKind,
    PartitionLimits,
    Site,
    begin_site,
    read_site,
)

CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits,qos
AccountingStoreFlags    = job_comment,job_env
ClusterName             = big
DefMemPerNode           = UNLIMITED
MaxArraySize            = 1001
"""
PARTITIONS = (
    "PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=YES MaxNodes=UNLIMITED "
    "MaxTime=UNLIMITED State=UP TotalNodes=9 JobDefaults=(null) DefMemPerCPU=2000 MaxMemPerNode=UNLIMITED\n"
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=lab,ai AllowQos=normal,long Default=NO MaxNodes=16 "
    "MaxTime=2-00:00:00 State=UP TotalNodes=40 JobDefaults=DefCpuPerGPU=8,DefMemPerGPU=60000 "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n"
)
NODES = (
    "cpu|9|64|256000|(null)|(null)\n"
    "gpu|30|64|512000|gpu:a100:4(S:0-1)|rack1,a100\n"
    "gpu|10|96|1000000|gpu:h100:8,nvme:3\n"
)

# as `scontrol show node --oneliner` of 22.05 prints a node, without the fields that are not read
RESERVED = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPUEfctv=14 CPUTot=16 CPULoad=2.71 AvailableFeatures=a100,ib "
    "ActiveFeatures=a100,ib Gres=gpu:a100:4(S:0-1) NodeAddr=127.0.0.1 Version=22.05.8 OS=Linux 6.18 #1 SMP @0  "
    "RealMemory=2000 AllocMem=0 FreeMem=16700 Sockets=1 Boards=1 CoreSpecCount=1 CPUSpecList=14-15 MemSpecLimit=500 "
    "State=IDLE ThreadsPerCore=2 TmpDisk=0 Partitions=gpu,secret  CfgTRES=cpu=14,mem=2000M,billing=14 AllocTRES= "
    "Reason=swapped, was RealMemory=1000 Gres=gpu:2 [root@2026-01-01T00:00:00]\n"
)
WHOLE = (
    "NodeName=n2 Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=N/A AvailableFeatures=(null) "
    "ActiveFeatures=(null) Gres=(null) NodeAddr=127.0.0.1 OS=Linux 6.18 #1 SMP @0  RealMemory=2000 AllocMem=0 "
    "State=IDLE ThreadsPerCore=2 TmpDisk=0 Partitions=cpu  CfgTRES=cpu=16,mem=2000M,billing=16 AllocTRES=\n"
)


def answers(**given: str) -> dict[str, str]:
    """By the words of the command that tell it from the others."""
    return {"config": CONFIG, "partition": PARTITIONS, "sinfo": NODES} | given


def site(given: dict[str, str]) -> Site:
    def ask(command: Sequence[str]) -> str | None:
        return next((text for word, text in given.items() if word in command), None)

    return read_site(ask)


def test_partitions_and_nodes() -> None:
    found = site(answers())
    assert (found.name, found.max_array_size, found.keeps_comments) == ("big", 1001, True)
    assert found.partition(None) == found.partitions["cpu"]
    gpu = found.partitions["gpu"]
    assert (gpu.max_nodes, gpu.max_time_s, gpu.cores_per_gpu, gpu.memory_default) == (16, 2 * 86400, 8, True)
    assert (gpu.accounts, gpu.qos) == (frozenset({"lab", "ai"}), frozenset({"normal", "long"}))
    a100 = NodeKind(30, 64, 512000, {"a100": 4}, frozenset({"rack1", "a100"}))
    assert gpu.kinds == (a100, NodeKind(10, 96, 1000000, {"h100": 8}))
    assert found.partitions["cpu"].kinds == (NodeKind(9, 64, 256000, {}),)
    assert [a100.meets(asked) for asked in (None, "a100&rack1", "h100|a100", "h100", "[h100]")] == [1, 1, 1, 0, 1]
    assert gpu.kinds[1].gpus_of(None) == 8
    assert gpu.kinds[1].gpus_of("a100") == 0
    assert found.partitions["cpu"].max_time_s is None


@pytest.mark.parametrize("cores_for_jobs", ["CPUEfctv=14 ", ""], ids=["counted", "older"])
def test_what_slurm_reserves_on_a_node_is_not_for_jobs(cores_for_jobs: str) -> None:
    """Slurm prints the CPUs for jobs since 22.05."""
    reserved = RESERVED.replace("CPUEfctv=14 ", cores_for_jobs)
    found = site(answers(node=reserved + reserved.replace("n1", "n3") + WHOLE))
    features = frozenset({"a100", "ib"})
    assert found.partitions["gpu"].kinds == (NodeKind(2, 14, 1500, {"a100": 4}, features),)
    assert found.partitions["cpu"].kinds == (NodeKind(1, 16, 2000, {}),)


def test_without_an_answer_about_the_nodes_the_sizes_of_sinfo_count() -> None:
    sizes = site(answers()).partitions["gpu"].kinds
    assert [(kind.cores, kind.memory_mb) for kind in sizes] == [(64, 512000), (96, 1000000)]
    assert site(answers(node="No nodes in the system\n")).partitions["gpu"].kinds == sizes


def test_all_queries_run_at_once_and_nobody_waits_before_the_answer_is_needed() -> None:
    all_began = threading.Barrier(9)  # eight queries and this test

    def ask(command: Sequence[str]) -> str | None:
        all_began.wait(60)
        return next((text for word, text in answers().items() if word in command), None)

    wait = begin_site(ask)
    all_began.wait(60)
    assert wait() == site(answers())


def test_nodes_that_differ_are_not_summed_up() -> None:
    """Without --exact, sinfo prints one line with the smallest values and a + for nodes that differ."""
    asked: list[Sequence[str]] = []
    read_site(asked.append)  # type: ignore[arg-type]
    (command,) = [command for command in asked if command[0] == "sinfo"]
    assert "--exact" in command


def test_hidden_partitions_are_listed() -> None:
    asked: list[Sequence[str]] = []
    read_site(asked.append)  # type: ignore[arg-type]
    listing = [command for command in asked if command[0] == "sinfo" or {"partition", "node"} & set(command)]
    assert ["--all" in command for command in listing] == [True, True, True]


def test_accounts_and_qos() -> None:
    found = site(
        answers(
            **{"user=": "big|root||||\nbig|dept|root|5|node=3,cpu=9\nbig|lab|dept||node=7\nfar|dept|root||node=1\n"},
            assoc="big|lab||normal,long|long|100|1-00:00:00|gres/gpu=8,node=2|\nbig|lab|gpu|normal|||||\n"
            "other|far||normal|||||\n",
            user="lab\n",
            qos="normal||50|12:00:00|gres/gpu=4|||\nlong|DenyOnLimit,PartitionTimeLimit||||||\n",
        )
    )
    assert found.associations is not None
    lab, on_gpu = found.associations
    assert (lab.account, lab.default, lab.qos) == ("lab", True, frozenset({"normal", "long"}))
    assert lab.limits == PartitionLimits(max_jobs=100, max_time_s=86400, max_nodes=2, max_gpus=8)
    assert [(each.partition, each.default_qos) for each in (lab, on_gpu)] == [(None, "long"), ("gpu", None)]
    assert [(name, group.max_jobs, group.group_nodes) for name, group in lab.groups] == [
        ("lab", None, 7),
        ("dept", 5, 3),
        ("root", None, None),
    ]
    assert found.qos == {
        "normal": PartitionLimits(50, 43200, None, 4),
        "long": PartitionLimits(flags=frozenset({"DenyOnLimit", "PartitionTimeLimit"})),
    }


def test_a_site_without_accounting_refuses_nobody_for_it() -> None:
    assert site(answers()).associations is None
    assert site(answers()).qos is None
    nothing = site({})
    assert (nothing.partitions, nothing.max_array_size, nothing.partition("gpu")) == ({}, None, None)
    assert not nothing.keeps_comments


def test_a_user_without_an_account_is_known_as_such() -> None:
    assert getpass.getuser()
    assert site(answers(assoc="", user="")).associations == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("10:30", 630),
        ("01:30:00", 5400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:00:00", 216000),
        ("UNLIMITED", None),
        ("", None),
        (None, None),
    ],
)
def test_time_limits(text: str | None, expected: int | None) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu:4", {"": 4}),
        ("gpu:a100:no_consume:4,gpu:no_consume:2", {"a100": 4, "": 2}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:4(S:0),gpu:v100:2(S:1),nvme:5", {"a100": 4, "v100": 2}),
        ("shard:8", {}),
        ("gpu:8", {"": 8}),
        ("gpu:3(S:0-1)", {"": 3}),
        ("gpu:ampere:0(IDX:N/A)", {"ampere": 0}),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),shard:nvidia_h100_80gb_hbm3:64", {"nvidia_h100_80gb_hbm3": 8}),
        ("gres/gpu:1", {"": 1}),
        ("gres:gpu:a100:2", {"a100": 2}),
        ("gres/gpfs:ess:1", {}),
        ("craynetwork:4", {}),
        ("", {}),
        ("(null)", {}),
    ],
)
def test_gpus(text: str, expected: dict[str, int]) -> None:
    assert gpus_of(text) == expected


def test_features_of_nodes_on_one_line_or_on_many() -> None:
    one_line = "NodeName=g1 Arch=x86_64 AvailableFeatures=a100,40gb ActiveFeatures=a100,40gb State=MIXED\n"
    many = (
        "   NodeName=nid07 Arch=x86_64 CoresPerSocket=16 \n   AvailableFeatures=(null)\n   ActiveFeatures=(null)\n"
        "   State=IDLE+DRAIN+MAINTENANCE+RESERVED ThreadsPerCore=1\n   Reason=xid 13 [root@2026-01-01T00:00:00]\n\n"
        "NodeName=hb-1 Arch=x86_64 \n   AvailableFeatures=HB,ib\n   ActiveFeatures=HB\n"
    )
    found = {"g1": frozenset({"a100", "40gb"}), "nid07": frozenset(), "hb-1": frozenset({"HB"})}
    assert {node.name: node.active_features for node in NodeRecord.read_all(one_line + many)} == found
    assert NodeRecord.read_all("") == []

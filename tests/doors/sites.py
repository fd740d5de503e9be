"""What Slurm's commands print on clusters of ten shapes, reduced to the fields that are read.

Those with the name of a site follow what it prints or publishes about its partitions: Puhti (CSC), Setonix (Pawsey),
Isambard-AI (Bristol). They are not recordings; some counts, accounts and features are made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A cluster.

    Attributes:
        answers: what a command prints, by a word of the command. Other commands fail.
        values: what the file sets besides ``defaults``.
        says: texts of the file, in which each line of a comment is joined.
    """

    answers: Mapping[str, str]
    values: Mapping[str, Any]
    says: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def ask(self, command: Sequence[str]) -> str | None:
        return next((text for word, text in self.answers.items() if word in command), None)


def config(name: str, version: str = "24.05.2", enforce: str = "none") -> str:
    lines = (f"ClusterName             = {name}", f"SLURM_VERSION           = {version}")
    return "\n".join([*lines, f"AccountingStorageEnforce = {enforce}", ""])


def partition(name: str, nodes: int, time: str = "2-00:00:00", **fields: str) -> str:
    more = {"Default": "NO", "MaxNodes": "UNLIMITED", "State": "UP", "AllowAccounts": "ALL", "AllowQos": "ALL"} | fields
    values = " ".join(f"{key}={value}" for key, value in more.items())
    return f"PartitionName={name} AllowGroups=ALL {values} MaxTime={time} TotalNodes={nodes}\n"


def node(name: str, partitions: str, gres: str, arch: str = "x86_64", features: str = "(null)") -> str:
    return (
        f"NodeName={name} Arch={arch} CPUEfctv=64 CPUTot=64 AvailableFeatures={features} ActiveFeatures={features} "
        f"Gres={gres} RealMemory=512000 State=IDLE Partitions={partitions}\n"
    )


NO_GPUS = partition("cpu", 9, Default="YES")
CPU_NODE = node("c1", "cpu", "(null)")
GPU = NO_GPUS + partition("gpu", 2)
GPU_NODE = node("g1", "gpu", "gpu:a100:4")

SHAPES = {
    "no accounting": Shape(
        {"config": config("small"), "partition": GPU, "node": CPU_NODE + GPU_NODE},
        {"cluster": {"partition": "gpu", "gpus_per_node": 4}},
        (
            "scontrol show partition: 2 nodes, at most 2-00:00:00. Others that you may use: cpu (9 nodes, no GPUs",
            "sinfo %G: gpu:a100:4 on 1 node with 64 cores and 500 GiB",
            "accounts and limits of accounts: sacctmgr does not respond",
        ),
    ),
    "accounts with limits": Shape(
        {
            "config": config("big", enforce="associations,limits,qos"),
            "partition": NO_GPUS
            + partition("gpu", 40, AllowAccounts="ai,bio", AllowQos="gpu", MaxNodes="8")
            + partition("secret", 90, AllowAccounts="others"),
            "node": CPU_NODE + GPU_NODE + node("s1", "secret", "gpu:h100:8"),
            "assoc": "big|lab||normal|normal||||\nbig|bio||gpu,normal|normal|10|1-00:00:00|gres/gpu=8|\n"
            "big|ai||gpu,normal|normal||||\nother|x||normal|||||\n",
            "user": "lab\n",
            "qos": "normal|||2-00:00:00||||\ngpu||4|1-00:00:00|gres/gpu=16|||\n",
            "sshare": "lab|0.9\nbio|0.2\nai|0.7\n",
        },
        {"cluster": {"partition": "gpu", "gpus_per_node": 4, "account": "ai", "qos": "gpu"}},
        (
            "2-00:00:00 and 8 nodes per job",
            "sacctmgr show assoc: ai, bio (ordered by sshare); your default account cannot use gpu",
            "sacctmgr show assoc, scontrol show partition: gpu, without the default normal",
        ),
    ),
    "GRES types": Shape(
        {
            "config": config("types"),
            "partition": partition("gpu", 13, "UNLIMITED", Default="YES", JobDefaults="DefCpuPerGPU=8"),
            "sinfo": "gpu|10|64|512000|gpu:a100:4(S:0-1)|(null)\ngpu|3|96|1000000|gpu:h100:8,nvme:3|(null)\n",
            "assoc": "types|lab||normal|||||\n",
            "user": "lab\n",
        },
        {"cluster": {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4}},
        (
            "sinfo %G: a100 on 10 nodes, h100 on 3 nodes; this is the most frequent type of whole GPUs",
            "account: jobs use your default account lab without this key. sacctmgr show assoc: lab",
            "cpus_per_gpu: auto uses the JobDefaults of gpu: DefCpuPerGPU=8",
            "the architecture of the nodes: `scontrol show node` names none",
        ),
    ),
    "features": Shape(
        {
            "config": config("features"),
            "partition": partition("all", 5, Default="YES"),
            "node": node("n1", "all", "(null)", features="cpu,milan")
            + node("n2", "all", "gpu:4", features="gpu,hbm40g")
            + node("n3", "all", "gpu:4", features="gpu,hbm80g"),
        },
        {"cluster": {"partition": "all", "gpus_per_node": 4}},
        (
            "constraint: features of some of the nodes (sinfo %f): gpu, hbm40g, hbm80g",
            "2 of the 3 nodes of the partition all have GPUs",
            "the type of the GPUs: sinfo %G names none",
        ),
    ),
    "MIG": Shape(
        {
            "config": config("sliced"),
            "partition": partition("mig", 2) + partition("gpu", 1),
            "node": node("m1", "mig", "gpu:a100_1g.5gb:28")
            + node("m2", "mig", "gpu:a100_1g.5gb:28")
            + node("g1", "gpu", "gpu:a100:4,gpu:a100_3g.20gb:8"),
        },
        {"cluster": {"partition": "gpu", "gpu_type": "a100", "gpus_per_node": 4}},
        ("Others that you may use: mig (2 nodes, gpu:a100_1g.5gb:28, 2-00:00:00)",),
    ),
    "only MIG": Shape(
        {
            "config": config("sliced"),
            "partition": partition("mig", 1),
            "node": node("m1", "mig", "gpu:a100_1g.5gb:28"),
        },
        {"cluster": {"partition": "mig", "gpus_per_node": 1}},
        ("MIG slices, and NCCL cannot connect two slices of one GPU: 1 per node is requested",),
    ),
    "federation": Shape(
        {
            "config": config("east"),
            "partition": GPU,
            "node": GPU_NODE,
            "federation": "Federation: two\nSelf:       east:10.0.0.1:6817 ID:1 FedState:ACTIVE Features:\n"
            "Sibling:    west:10.0.0.2:6817 ID:2 FedState:ACTIVE Features: PersistConnSend/Recv:Yes/Yes Synced:Yes\n",
        },
        {"cluster": {"partition": "gpu", "gpus_per_node": 4}},
        ("clusters: the federation has west (scontrol show federation); by default a job stays on east",),
    ),
    "old output": Shape(  # 14.11: Shared=, no CPUEfctv, no MaxTRES in sacctmgr
        {
            "config": config("old", "14.11.8"),
            "partition": "PartitionName=short AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
            "Default=YES DefaultTime=NONE Hidden=NO MaxNodes=4 MaxTime=00:30:00 MinNodes=1 Nodes=n[1-4] RootOnly=NO "
            "ReqResv=NO Shared=EXCLUSIVE PreemptMode=OFF State=UP TotalCPUs=64 TotalNodes=4 SelectTypeParameters=N/A "
            "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n",
            "node": "NodeName=n1 Arch=x86_64 CoresPerSocket=8 CPUAlloc=0 CPUErr=0 CPUTot=16 CPULoad=0.01 Features=k80 "
            "Gres=gpu:2 NodeAddr=n1 NodeHostName=n1 Version=14.11 OS=Linux RealMemory=64000 AllocMem=0 Sockets=2 "
            "Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1\n",
            "sinfo": "short|4|16|64000|gpu:2|k80\n",
        },
        {"cluster": {"partition": "short", "gpus_per_node": 2, "exclusive": True, "time": "00:30:00"}},
        (
            "(Slurm 14.11.8)",
            "OverSubscribe=EXCLUSIVE, only whole nodes",
            "scontrol show partition: MaxTime of short",
            "sacctmgr does not respond",
        ),
    ),
    "Puhti": Shape(
        {
            "config": config("puhti", "22.05.10", "associations,limits,qos"),
            "partition": partition("small", 682, "3-00:00:00", MaxNodes="1")
            + partition("gputest", 2, "00:15:00", MaxNodes="2", QoS="N/A")
            + partition("gpu", 78, "3-00:00:00", MaxNodes="20", QoS="gputres_accrue", JobDefaults="(null)"),
            "sinfo": "small|682|40|190000|nvme:1490|type_s\ngputest|2|40|382000|gpu:v100:4,nvme:3600|type_gpu\n"
            "gpu|78|40|382000|gpu:v100:4,nvme:3600|type_gpu\n",
            "assoc": "puhti|project_2001234||normal|||||\npuhti|project_2005678||normal|||||\n",
            "user": "\n",
        },
        {"cluster": {"partition": "gpu", "gpus_per_node": 4, "account": "project_2001234"}},
        (
            "78 nodes, at most 3-00:00:00 and 20 nodes per job",
            "small (682 nodes, at most 1 per job, no GPUs, 3-00:00:00), gputest (2 nodes, gpu:v100:4, 00:15:00)",
            "sacctmgr show assoc: project_2001234, project_2005678",
        ),
    ),
    "Setonix": Shape(
        {
            "config": config("setonix", "22.05.2", "associations,limits,qos"),
            "partition": partition("work", 1376, "1-00:00:00", Default="YES", OverSubscribe="FORCE:1")
            + partition(
                "gpu", 134, "1-00:00:00", JobDefaults="DefMemPerGPU=29440", TRESBillingWeights="CPU=1,gres/GPU=64"
            ),
            "node": node("nid001008", "work", "(null)") + node("nid001000", "gpu", "gpu:8"),
            "assoc": "setonix|pawsey0001||normal|||||\nsetonix|pawsey0001-gpu||normal|||||\n",
            "user": "pawsey0001\n",
        },
        {"cluster": {"partition": "gpu", "gpus_per_node": 8}, "run": {"root": "${oc.env:MYSCRATCH}/hpc_train"}},
        (
            "auto uses the JobDefaults of gpu: DefMemPerGPU=29440",
            "sacctmgr show assoc: pawsey0001, pawsey0001-gpu",
            "$MYSCRATCH, a directory that you may write",
        ),
        {"MYSCRATCH": "/tmp"},
    ),
    "Isambard-AI": Shape(
        {
            "config": config("isambard", "23.11.8", "associations,limits,qos"),
            "partition": partition("workq", 1320, "1-00:00:00", Default="YES"),
            "node": node("nid010001", "workq", "gpu:4", "aarch64"),
            "assoc": "isambard|brics.p1||32gpu_qos|32gpu_qos||||\n",
            "user": "brics.p1\n",
            "--help": "      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH\n",
        },
        {"cluster": {"partition": "workq", "gpus_per_node": 4}},
        (
            "python: the Python of an environment for the nodes: the nodes are aarch64 (scontrol show node)",
            "container.image: FILE.sif or an image of a registry; here: pyxis (srun --help)",
        ),
    ),
}

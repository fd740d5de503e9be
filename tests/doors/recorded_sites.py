"""Outputs of Slurm's commands on real sites, quoted from public documents, and what ``init --site`` reads in them.

The texts in capitals are verbatim, with the columns and the line breaks of the document, which may quote a part; lines
of tables that add nothing are left out, and ``{name}`` stands for the name of a person. In ``RECORDED``, the name and
version of each cluster are made up, and so are what is written there without such a text: the associations and QOS of
DSAI, Helmholtz Munich and Iridis, and the partitions of Savio and Biowulf. Other commands fail.
"""

# ruff: noqa: E501
from __future__ import annotations

import re
from collections.abc import Sequence

from tests.doors.sites import Shape, config


def one_line(text: str) -> str:
    """Returns records of ``scontrol show`` as ``--oneliner`` prints them."""
    return re.sub(r"\n\s+", " ", text.strip("\n")) + "\n"


def columns(text: str, names: Sequence[str]) -> str:
    """Returns the named columns of a table whose cells have no spaces, separated as ``--format=%R|...`` does."""
    head, *lines = (line.split() for line in text.strip().splitlines())
    picked = [[line[head.index(name)].rstrip("*") for name in names] for line in lines]
    return "".join("|".join(line) + "\n" for line in picked)


def parsed(text: str, names: Sequence[str]) -> str:
    """Returns the named columns of a table that ``sacctmgr -p`` has printed; a name that it lacks is empty."""
    head, *lines = (line.split("|") for line in text.strip().splitlines())
    cells = [["" if name not in head else line[head.index(name)] for name in names] for line in lines]
    return "".join("|".join(line) + "\n" for line in cells)


ASSOCIATION = ("Cluster", "Account", "Partition", "QOS", "Def QOS", "MaxSubmit", "MaxWall", "MaxTRES", "GrpTRES")

# FAQ of a research group on Raven, Max Planck Computing and Data Facility: sinfo -o "%20P %5D %10c %10m %25f %10G"
RAVEN_SINFO = """
PARTITION            NODES CPUS       MEMORY     AVAIL_FEATURES            GRES
interactive*         2     144        512000     login,icelake             (null)
general              144   144        240000     icelake,fhi,cpu           (null)
general              1378  144        240000     icelake,cpu               (null)
general              157   144        500000     icelake,gpu               gpu:a100:4
general              32    144        500000     icelake,gpu-bw            gpu:a100:4
general              4     144        2048000    icelake,hugemem           (null)
general              64    144        500000     icelake,largemem          (null)
gpu                  157   144        500000     icelake,gpu               gpu:a100:4
gpu                  32    144        500000     icelake,gpu-bw            gpu:a100:4
gpudev               1     144        500000     icelake,gpu               gpu:a100:4
"""
RAVEN_GPUDEV = """
PartitionName=gpudev
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=NO CpuBind=cores  QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=1 MaxTime=00:15:00 MinNodes=1 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED
   NodeSets=dev
   Nodes=ravg1002
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=OFF
   State=UP TotalCPUs=144 TotalNodes=1 SelectTypeParameters=NONE
   JobDefaults=DefCpuPerGPU=36
   DefMemPerNode=125000 MaxMemPerNode=UNLIMITED
   TRES=cpu=144,mem=500000M,node=1,billing=144,gres/gpu=4,gres/gpu:a100=4
"""

# User guide of DSAI, Johns Hopkins University: scontrol show partition=h100
DSAI_H100 = """
PartitionName=h100
   AllowGroups=ALL AllowAccounts=jhu DenyQos=jsalt_2026
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=3-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=124 MaxCPUsPerSocket=UNLIMITED
   NodeSets=h100
   Nodes=gh[101-132]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=YES:4
   OverTimeLimit=NONE PreemptMode=REQUEUE
   State=UP TotalCPUs=4096 TotalNodes=32 SelectTypeParameters=NONE
   JobDefaults=DefCpuPerGPU=30
   DefMemPerCPU=12000 MaxMemPerCPU=12000
   TRES=cpu=3968,mem=49504000M,node=32,billing=4027,gres/gpu=128
   TRESBillingWeights=CPU=1,Mem=0.0833G,GRES/gpu=2
"""

# README of a research group at Helmholtz Munich: scontrol show partitions, some of them
HELMHOLTZ_PARTITIONS = """
PartitionName=interactive_gpu_p
   AllowGroups=ALL AllowAccounts=ALL AllowQos=interactive_gpu,interactive_gpu_short
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=12:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=gpusrv[22-25]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=GANG,SUSPEND
   State=UP TotalCPUs=256 TotalNodes=4 SelectTypeParameters=NONE
   JobDefaults=DefCpuPerGPU=3,DefMemPerGPU=16384
   DefMemPerCPU=2048 MaxMemPerCPU=2730
   TRES=cpu=216,mem=1504448M,node=4,billing=216,gres/gpu=8
PartitionName=cpu_p
   AllowGroups=ALL AllowAccounts=ALL AllowQos=cpu_short,cpu_normal,cpu_long,cpu_priority,cpu_reservation,cpu,icb,normal,priority,longjobs
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=3-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=cpusrv[39-50],supercpu[01-02]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=GANG,SUSPEND
   State=UP TotalCPUs=1664 TotalNodes=14 SelectTypeParameters=NONE
   JobDefaults=(null)
   DefMemPerCPU=100 MaxMemPerNode=UNLIMITED
   TRES=cpu=1546,mem=13143942M,node=14,billing=1546
PartitionName=gpu_p
   AllowGroups=ALL AllowAccounts=ALL AllowQos=gpu_short,gpu_normal,gpu_long,gpu_priority,gpu_reservation,gpu
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=gpusrv[26-35,38-52]
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=GANG,SUSPEND
   State=UP TotalCPUs=3200 TotalNodes=25 SelectTypeParameters=NONE
   JobDefaults=DefCpuPerGPU=3,DefMemPerGPU=12500
   DefMemPerCPU=2048 MaxMemPerNode=UNLIMITED
   TRES=cpu=3000,mem=19081150M,node=25,billing=3000,gres/gpu=54
PartitionName=cemp_gpu_p
   AllowGroups=ALL AllowAccounts=ALL AllowQos=cemp_gpu
   AllocNodes=ALL Default=NO QoS=N/A
   DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=5-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED
   Nodes=supergpu06
   PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=GANG,SUSPEND
   State=UP TotalCPUs=240 TotalNodes=1 SelectTypeParameters=NONE
   JobDefaults=DefMemPerGPU=20480
   DefMemPerCPU=100 MaxMemPerNode=UNLIMITED
   TRES=cpu=220,mem=1988645M,node=1,billing=220,gres/gpu=2
"""

# Report of a course on Santos Dumont, LNCC: scontrol show partition, sinfo -N -o "%N %G %c %m %t", sacctmgr
SDUMONT_PARTITION = """
PartitionName=sequana_gpu_dev
   AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL
   AllocNodes=ALL Default=NO QoS=defaultgpu
   DefaultTime=00:20:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 LLN=NO
   MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED
   Nodes=sdumont[8029-8055,8061-8083,8085-8091,8093-8095]
   PriorityJobFactor=40 PriorityTier=40 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=NONE PreemptMode=OFF
   State=UP TotalCPUs=2880 TotalNodes=60 SelectTypeParameters=NONE
   JobDefaults=DefCpuPerGPU=12,DefMemPerGPU=94000
   DefMemPerCPU=8000 MaxMemPerNode=UNLIMITED
   TRES=cpu=2880,mem=22500G,node=60,billing=2880,gres/gpu=240
"""
SDUMONT_SINFO = """
NODELIST     GRES         CPUS  MEMORY  STATE
sdumont8029  gpu:v100:4   48    384000  alloc
"""

# Training on Savio, University of California, Berkeley: sacctmgr -p show associations user={name}, some of them
SAVIO_ASSOCIATIONS = """
Cluster|Account|User|Partition|Share|GrpJobs|GrpTRES|GrpSubmit|GrpWall|GrpTRESMins|MaxJobs|MaxTRES|MaxTRESPerNode|MaxSubmit|MaxWall|MaxTRESMins|QOS|Def QOS|GrpTRESRunMins|
brc|co_stat|{name}|savio2_1080ti|1||||||||||||savio_lowprio|savio_lowprio||
brc|co_stat|{name}|savio2_gpu|1||||||||||||savio_lowprio,stat_gpu2_normal|stat_gpu2_normal||
brc|co_stat|{name}|savio2|1||||||||||||savio_lowprio,stat_savio2_normal|stat_savio2_normal||
brc|fc_{name}|{name}|savio2_gpu|1||||||||||||savio_debug,savio_normal|savio_normal||
brc|fc_{name}|{name}|savio2|1||||||||||||savio_debug,savio_normal|savio_normal||
"""

# Documentation of Biowulf, National Institutes of Health: scontrol show node=cn1092
BIOWULF_NODE = """
NodeName=cn1092 Arch=x86_64 CoresPerSocket=8
   CPUAlloc=64 CPUTot=64 CPULoad=6.96
   AvailableFeatures=cpu64,core32,g256,ssd3200,e7543p,ibhdr200,gpua100
   ActiveFeatures=cpu64,core32,g256,ssd3200,e7543p,ibhdr200,gpua100
   Gres=gpu:a100:4(S:0-3),lscratch:3200
   NodeAddr=cn1092 NodeHostName=cn1092 Version=21.08.8-2
   OS=Linux 3.10.0-862.14.4.el7.x86_64 #1 SMP Wed Sep 26 15:12:11 UTC 2018
   RealMemory=253400 AllocMem=204800 FreeMem=99636 Sockets=4 Boards=1
   State=ALLOCATED ThreadsPerCore=2 TmpDisk=3601900 Weight=10000 Owner=N/A MCS_label=N/A
   Partitions=interactive,gpu
   BootTime=2022-12-09T13:07:40 SlurmdStartTime=2022-12-11T11:47:25
   LastBusyTime=2022-12-21T14:20:58
   CfgTRES=cpu=64,mem=253400M,billing=64,gres/gpu=4,gres/gpu:a100=4,gres/lscratch=3200
   AllocTRES=cpu=64,mem=200G,gres/gpu=4,gres/gpu:a100=4
   CapWatts=n/a
   CurrentWatts=0 AveWatts=0
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
"""

# User guide of HPC3, University of California, Irvine: scontrol show partition standard, scontrol show node
HPC3_PARTITION = """
PartitionName=standard
   AllowGroups=ALL AllowAccounts=ALL AllowQos=normal,high
   AllocNodes=ALL Default=YES QoS=normal
   DefaultTime=2-00:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO
   MaxNodes=159 MaxTime=14-00:00:00 MinNodes=1 LLN=NO MaxCPUsPerNode=64
   Nodes=hpc3-14-[00-31],hpc3-15-[00-19,21,24-31],hpc3-17-[08-11],...
   PriorityJobFactor=100 PriorityTier=100 RootOnly=NO ReqResv=NO OverSubscribe=NO
   OverTimeLimit=0 PreemptMode=OFF
   State=UP TotalCPUs=7136 TotalNodes=159 SelectTypeParameters=CR_CORE_MEMORY
   JobDefaults=(null)
   DefMemPerCPU=3072 MaxMemPerCPU=6144
   TRES=cpu=7136,mem=35665000M,node=159,billing=7136
"""
HPC3_NODE = """
NodeName=hpc3-gpu-16-00 Arch=x86_64 CoresPerSocket=20
   CPUAlloc=26 CPUEfctv=40 CPUTot=40 CPULoad=6.80
   AvailableFeatures=intel,avx512,mlx5_ib
   ActiveFeatures=intel,avx512,mlx5_ib
   Gres=gpu:V100:4
   NodeAddr=hpc3-gpu-16-00 NodeHostName=hpc3-gpu-16-00 Version=24.05.3
   OS=Linux 4.18.0-477.15.1.el8_8.x86_64 #1 SMP Wed Jun 28 15:04:18 UTC 2023
   RealMemory=192000 AllocMem=150720 FreeMem=39430 Sockets=2 Boards=1
   State=MIXED ThreadsPerCore=1 TmpDisk=228000 Weight=3 Owner=N/A MCS_label=N/A
   Partitions=free-gpu,gpu
   BootTime=2024-09-17T15:48:44 SlurmdStartTime=2024-10-22T16:04:19
   LastBusyTime=2024-10-21T16:19:36 ResumeAfterTime=None
   CfgTRES=cpu=40,mem=187.50G,billing=168,gres/gpu=4
   AllocTRES=cpu=26,mem=150720M,gres/gpu=4
   CurrentWatts=0 AveWatts=0
"""

# Course on Iridis, University of Southampton: scontrol show partition=batch, of which it leaves lines out
IRIDIS_BATCH = """
PartitionName=batch
   AllowGroups=ALL DenyAccounts=worldpop AllowQos=ALL
   MaxTime=2-12:00:00 MinNodes=0
   State=UP TotalCPUs=25728 TotalNodes=134
   DefMemPerCPU=3350 MaxMemPerNode=650000
"""

# A test of delfin, a program for users of bwUniCluster 3.0, where sinfo is refused: scontrol show partition --oneliner
BWUNICLUSTER_PARTITIONS = """\
PartitionName=cpu State=UP TRES=cpu=15360,mem=30920000M,node=80,billing=15360
PartitionName=dev_gpu_h100 State=UP TRES=cpu=192,mem=773500M,node=1,billing=192,gres/gpu=4
PartitionName=gpu_h100 State=UP TRES=cpu=2304,mem=9282000M,node=12,billing=2304,gres/gpu=48
PartitionName=gpu_old State=DOWN TRES=cpu=96,mem=380000M,node=1,billing=96,gres/gpu=4
PartitionName=gpu_a100_il State=UP TRES=cpu=1152,mem=4590000M,node=9,billing=1152,gres/gpu=36
"""

RECORDED = {
    "Raven": Shape(
        {
            "config": config("raven"),
            "partition": one_line(RAVEN_GPUDEV),
            "sinfo": columns(RAVEN_SINFO, ("PARTITION", "NODES", "CPUS", "MEMORY", "GRES", "AVAIL_FEATURES")),
        },
        {"cluster": {"partition": "gpudev", "gpus_per_node": 4, "time": "00:15:00"}},
        ("sinfo %G: gpu:a100:4 on 1 node with 144 cores and 488 GiB", "JobDefaults of gpudev: DefCpuPerGPU=36"),
    ),
    "DSAI": Shape(
        {
            "config": config("dsai", enforce="associations,limits,qos"),
            "partition": one_line(DSAI_H100),
            "assoc": "dsai|jhu||jsalt_2026,normal|jsalt_2026||||\n",
            "user": "jhu\n",
        },
        {"cluster": {"partition": "h100", "gpus_per_node": 4, "qos": "normal"}},
        (
            "scontrol show partition TRES: gpu:4 on 32 nodes with 124 cores and 1510 GiB",
            "scontrol show partition: normal, without the default jsalt_2026",
        ),
    ),
    "Helmholtz Munich": Shape(
        {
            "config": config("hpc", enforce="associations,limits,qos"),
            "partition": one_line(HELMHOLTZ_PARTITIONS).replace(" PartitionName=", "\nPartitionName="),
            "assoc": "hpc|haicu||cpu,gpu,icb,interactive_gpu|||||\n",
            "user": "haicu\n",
            "qos": "gpu|||2-00:00:00||||\ninteractive_gpu|||12:00:00||||\n",
        },
        {"cluster": {"partition": "gpu_p", "qos": "gpu"}},
        (
            "no GRES gpu on the nodes of gpu_p (sinfo --format=%R|%G); it has 54 on 25 nodes by its TRES",
            "interactive_gpu_p (4 nodes, gpu:2, 12:00:00), cpu_p (14 nodes, no GPUs, 3-00:00:00)",
        ),
    ),
    "Santos Dumont": Shape(
        {
            "config": config("sdumont", enforce="associations,limits,qos"),
            "partition": one_line(SDUMONT_PARTITION),
            "sinfo": "sequana_gpu_dev|60|"
            + columns(SDUMONT_SINFO, ("CPUS", "MEMORY", "GRES")).replace("\n", "|(null)\n"),
            # the columns MaxJobs 1, MaxSubmit 1, MaxNodes 4, MaxCPUs 192 and MaxWall 00:20:00 of the report
            "assoc": "sdumont|peia-hpc|sequana_gpu_dev|||1|00:20:00|cpu=192,node=4|\n",
            "user": "peia-hpc\n",
        },
        {"cluster": {"partition": "sequana_gpu_dev", "gpus_per_node": 4, "time": "00:20:00"}},
        (
            "sacctmgr show assoc, account peia-hpc: MaxWall",
            "nodes: sacctmgr show assoc, account peia-hpc: limits of 4 nodes per job, 1 in the queue",
            "scontrol show partition: 60 nodes, no time limit",
        ),
    ),
    "Savio": Shape(
        {
            "config": config("brc", enforce="associations,limits,qos"),
            # the nodes and limits of the partitions are not quoted
            "partition": "PartitionName=savio2 AllowQos=ALL State=UP TotalNodes=163\n"
            "PartitionName=savio2_gpu AllowQos=ALL State=UP TotalNodes=17 TRES=cpu=136,node=17,gres/gpu=68\n",
            "assoc": parsed(SAVIO_ASSOCIATIONS.replace("{name}", "oski"), ASSOCIATION),
            "user": "fc_oski\n",
        },
        {"cluster": {"partition": "savio2_gpu", "gpus_per_node": 4}},
        (
            "account: jobs use your default account fc_oski without this key. sacctmgr show assoc: fc_oski, co_stat",
            "qos: the default is savio_normal; sacctmgr show assoc: savio_debug, savio_normal",
        ),
    ),
    "Biowulf": Shape(
        {
            "config": config("biowulf", "21.08.8-2"),
            "partition": "PartitionName=gpu State=UP TotalNodes=1\n",
            "node": one_line(BIOWULF_NODE),
        },
        {"cluster": {"partition": "gpu", "gpus_per_node": 4}},
        ("sinfo %G: gpu:a100:4 on 1 node with 64 cores and 247 GiB",),
    ),
    "HPC3": Shape(
        {"config": config("hpc3", "24.05.3"), "partition": one_line(HPC3_PARTITION), "node": one_line(HPC3_NODE)},
        {"cluster": {"partition": "standard"}},
        (
            "scontrol show partition: 159 nodes, at most 14-00:00:00 and 159 nodes per job",
            "GPUs: sinfo lists no GRES gpu on the nodes of standard",
        ),
    ),
    "Iridis": Shape(
        {
            "config": config("iridis", enforce="associations"),
            "partition": one_line(IRIDIS_BATCH),
            "assoc": "iridis|worldpop||normal|||||\niridis|default||normal|||||\n",
            "user": "worldpop\n",
        },
        {"cluster": {"partition": "batch", "account": "default"}},
        ("sacctmgr show assoc: default; your default account cannot use batch",),
    ),
    "bwUniCluster": Shape(
        {"config": config("uc3"), "partition": BWUNICLUSTER_PARTITIONS},
        {"cluster": {"partition": "gpu_h100", "gpus_per_node": 4}},
        (
            "scontrol show partition TRES: gpu:4 on 12 nodes with 192 cores and 755 GiB",
            "gpu_a100_il (0 nodes, gpu:4, no limit)",
        ),
    ),
}

# GRES as printed by Rorqual, Narval and Mila (a test of cluv, a program for users of the Digital Research Alliance of
# Canada), by Frontenac (a report of a user), and by a server with one node (its guide)
GRES = {
    "gpu:h100:4(S:0-1)": {"h100": 4},
    "gpu:nvidia_h100_80gb_hbm3_3g.40gb:3(S:0-1),gpu:nvidia_h100_80gb_hbm3_2g.20gb:3(S:0-1)": {
        "nvidia_h100_80gb_hbm3_3g.40gb": 3,
        "nvidia_h100_80gb_hbm3_2g.20gb": 3,
    },
    "gpu:a100_3g.20gb:3(S:1,3,7),gpu:a100_4g.20gb:1(S:3),gpu:a100_2g.10gb:4(S:1,5,7)": {
        "a100_3g.20gb": 3,
        "a100_4g.20gb": 1,
        "a100_2g.10gb": 4,
    },
    "gpu:a100l:8": {"a100l": 8},
    "gpu:v100:1(S:0)": {"v100": 1},
    "gpu:3(S:0-1)": {"": 3},
    "gpu:nvidia_a100-sxm4-40gb:8(S:1,3,5,7)": {"nvidia_a100-sxm4-40gb": 8},
}

"""Handles the networks that NCCL and RCCL reach only through libfabric: AWS EFA and HPE Slingshot.

Both libraries need the plugin aws-ofi-nccl for these networks (RCCL as ``librccl-net.so``; before ROCm 7 aws-ofi-rccl).
Without the plugin they silently fall back to TCP, which is many times slower. ``NCCL_NET`` prevents this: the library
then refuses to start without the plugin. The variables for Slingshot are published by its vendor and by sites:

- HPE: https://github.com/HewlettPackard/shs-ccl-docs/blob/main/ccl_env.sh (May 2026)
- CSCS (Alps): https://docs.cscs.ch/software/communication/nccl (2026)
- Isambard-AI: https://docs.isambard.ac.uk/user-documentation/guides/nccl (2026)
- Sigma2 (Olivia): https://documentation.sigma2.no/hpc_machines/olivia/nccl.html (May 2026)
- ALCF (Polaris): https://docs.alcf.anl.gov/polaris/applications-and-libraries/libraries/nccl (October 2024)

For AMD GPUs, on which these settings have not been tested:

- OLCF, "PyTorch on Frontier" (docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html, as of ROCm 7.1.1, 2026)
- LUMI, "PyTorch" (lumi-supercomputer.github.io/LUMI-EasyBuild-docs/p/PyTorch, read 2026): NCCL_SOCKET_IFNAME over the
  interfaces hsn0 to hsn3; NCCL_NET_GDR_LEVEL=3, the same as PHB, is the default since ROCm 6.2
- LUMI, https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/97 (May 2026): an explicit NCCL_NET_GDR_LEVEL
- fi_cxi(7) of libfabric 2: the meaning of the variables FI_CXI_*
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_train.machine.environment import Variable
from hpc_train.machine.network.facts import NodeFacts, Setting

# the name that all versions of the plugin accept; versions after 1.11 also accept Libfabric and OFI
PLUGIN_NAME = "AWS Libfabric"
FABRICS = ("efa", "slingshot")
_LIBRARY = "lib*ccl-net*.so*"  # also librccl-net.so
_FOLDERS = ("opt/amazon/ofi-nccl/lib", "opt/amazon/ofi-nccl/lib64", "opt/aws-ofi-nccl/lib", "usr/lib", "usr/lib64")
_FOLDERS_PER_MACHINE = ("opt/amazon/ofi-nccl/lib/*-linux-gnu", "usr/lib/*-linux-gnu")

_EAGER = (
    "disables eager messages, which arrive corrupted on Grace-Hopper and make NCCL hang elsewhere (HPE's shs-ccl-docs "
    "pull request 21, April 2026; nccl issue 2001; CSCS)"
)
SLINGSHOT = (
    Variable(
        "FI_MR_CACHE_MONITOR", "userfaultfd", "the default monitor deadlocks with NCCL on Slingshot (HPE, CSCS, ALCF)"
    ),
    Variable(
        "FI_CXI_DISABLE_HOST_REGISTER", "1", "registering host memory with CUDA deadlocks with NCCL (HPE, CSCS, ALCF)"
    ),
    Variable(
        "FI_CXI_DEFAULT_CQ_SIZE", "131072", "the default completion queue overflows in large jobs (HPE, CSCS, ALCF)"
    ),
    Variable("FI_CXI_DEFAULT_TX_SIZE", "2048", "the default transmit queue is too short for large jobs (HPE, Sigma2)"),
    Variable(
        "FI_CXI_RX_MATCH_MODE", "hybrid", "matches messages in software when the NIC has no more entries (HPE, Sigma2)"
    ),
    Variable("FI_CXI_RDZV_EAGER_SIZE", "0", _EAGER),
    Variable("FI_CXI_RDZV_GET_MIN", "0", _EAGER),
    Variable("FI_CXI_RDZV_THRESHOLD", "0", _EAGER),
    Variable(
        "NCCL_NET_GDR_LEVEL",
        "PHB",
        "Slingshot's NICs are attached to the CPU, where NCCL does not use GPUDirect by default (HPE, CSCS, ALCF)",
    ),
    Variable("NCCL_CROSS_NIC", "1", "Slingshot connects every NIC to every other, unlike rails (HPE, CSCS, ALCF)"),
    Variable("NCCL_SOCKET_IFNAME", "hsn", "selects the high-speed interfaces instead of the management network"),
)
_NO_LL128 = Variable(
    "NCCL_PROTO", "^LL128", "this protocol corrupts data on Grace-Hopper over Slingshot (nccl issue 2001; CSCS sets it)"
)


def variables(fabric: str, nodes: Sequence[NodeFacts], settings: Mapping[str, Setting]) -> Iterator[Variable]:
    """Yields the variables of a job over libfabric.

    Args:
        fabric: one of ``FABRICS``.
        settings: variables that are already set, by name.
    """
    if "NCCL_NET_PLUGIN" not in settings:  # with it, the user has selected another plugin, which NCCL prefers
        yield Variable(
            "NCCL_NET",
            PLUGIN_NAME,
            "makes NCCL fail without the plugin aws-ofi-nccl instead of silently using TCP; NCCL_NET=Socket allows TCP",
        )
    if fabric == "slingshot":
        yield from SLINGSHOT
        if any("GH200" in (gpu.model or "") for facts in nodes for gpu in facts.gpus):
            yield _NO_LL128


def unknown(nodes: Sequence[NodeFacts], network: str | None) -> Iterator[str]:
    """Yields a line if the plugin was not found on a node. NCCL may search other folders. ``network`` is the value of
    NCCL_NET that the user or the site profile has set."""
    if network is not None and network.lower() in ("socket", "ib"):
        return
    if any(facts.net_plugin is None for facts in nodes):
        yield "whether NCCL finds the plugin aws-ofi-nccl; without it NCCL refuses to start"
    without = [facts.node or "?" for facts in nodes if facts.net_plugin == ""]
    if without:
        names = ", ".join(without[:4]) + (f" and {len(without) - 4} more" if len(without) > 4 else "")
        yield (
            f"whether NCCL finds the plugin aws-ofi-nccl on {names}: {_LIBRARY} is in no folder of LD_LIBRARY_PATH; "
            "load the site's module in cluster.setup"
        )


def find_plugin(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """Returns the path of a network plugin of NCCL; "" if the folders that the loader searches contain none."""
    searched = [Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    searched += [root / folder for folder in _FOLDERS]
    searched += [path for pattern in _FOLDERS_PER_MACHINE for path in sorted(root.glob(pattern))]
    for folder in searched:
        try:
            if library := min(folder.glob(_LIBRARY), default=None):
                return str(library)
        except OSError:
            continue
    return ""


_OLCF = "(OLCF, PyTorch on Frontier)"
_SLINGSHOT = (
    ("NCCL_SOCKET_IFNAME", "hsn", "selects the high-speed interfaces instead of the management network"),
    ("NCCL_CROSS_NIC", "1", f"a ring may use different NICs on different nodes, which is faster in large jobs {_OLCF}"),
    ("FI_MR_CACHE_MONITOR", "userfaultfd", f"the monitor memhooks of older libfabric deadlocks with RCCL {_OLCF}"),
    ("FI_CXI_DISABLE_HOST_REGISTER", "1", f"libfabric does not page-lock its buffers for each GPU process {_OLCF}"),
    ("FI_CXI_DEFAULT_CQ_SIZE", "131072", f"the default queue of completions is too small for many ranks {_OLCF}"),
    ("FI_CXI_DEFAULT_TX_SIZE", "2048", f"the default queue of pending messages is too small for many ranks {_OLCF}"),
    ("FI_CXI_RDZV_EAGER_SIZE", "0", f"disables eager messages, as HPE and AMD advise {_OLCF}"),
    ("FI_CXI_RDZV_GET_MIN", "0", f"disables eager messages, as HPE and AMD advise {_OLCF}"),
    ("FI_CXI_RDZV_THRESHOLD", "0", f"disables eager messages, as HPE and AMD advise {_OLCF}"),
    ("FI_CXI_RX_MATCH_MODE", "hybrid", f"libfabric matches messages in software if the NIC has no more room {_OLCF}"),
)
_RENDEZVOUS = (
    "the rendezvous protocol alt_read is faster in large jobs, but needs --network=disable_rdzv_get in "
    f"cluster.extra; set it in cluster.env {_OLCF}"
)
_PLUGIN = "makes RCCL fail without the plugin librccl-net.so instead of silently using TCP; NCCL_NET=Socket allows TCP"
NO_GPU_DIRECT = (
    "set NCCL_DMABUF_ENABLE=1 in cluster.env if the kernel has CONFIG_PCI_P2PDMA and CONFIG_DMABUF_MOVE_NOTIFY, or ask "
    "the site for amdkfd's peer memory (amdgpu built for the InfiniBand driver); GPUDirect is up to 3 times faster"
)
# expandable segments came to ROCm after torch 2.11 (pytorch#177974); before, torch warns that it ignores them
_NOT_READ = frozenset(
    {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "NCCL_MNNVL_ENABLE", "PYTORCH_CUDA_ALLOC_CONF"}
)


def on_amd(nodes: Sequence[NodeFacts]) -> bool:
    return any(gpu.amd for facts in nodes for gpu in facts.gpus)


def rccl_variables(settings: Mapping[str, Setting]) -> Iterator[Variable]:
    """Yields the variables that a job on several nodes with Slingshot exports. ``settings`` are variables that are
    already set, by name."""
    if "NCCL_NET_PLUGIN" not in settings:  # Frontier's module sets it
        yield Variable("NCCL_NET", "AWS Libfabric", _PLUGIN)
    for name, value, reason in _SLINGSHOT:
        yield Variable(name, value, reason)


def read_by_rccl(variables: Iterable[Variable]) -> list[Variable]:
    return [variable for variable in variables if variable.name not in _NOT_READ]


_GDR_LEVEL = (
    "RCCL detects it, and PHB is the default since ROCm 6.2; with an explicit value, multi-node jobs hang in LUMI's "
    "ROCm 7.0 containers (LUMI-AI-Guide#97, May 2026)"
)
FORK_SAFE = (
    "data loaders are forked after the NIC is open; if they crash, set 1 in cluster.env, or batch.loader_workers=0. "
    "Public scripts for LUMI set 1, those for Delta 0"
)


def not_set_for_rccl(fabric: str) -> Iterator[tuple[str, str]]:
    """Yields the names of common variables that are not set, and the reasons."""
    if fabric != "one_node":
        yield "NCCL_NET_GDR_LEVEL", _GDR_LEVEL
    if fabric == "slingshot":
        yield "FI_CXI_RDZV_PROTO", _RENDEZVOUS
    if fabric in ("infiniband", "roce"):
        yield "NCCL_DMABUF_ENABLE", "RCCL reads GPU memory through amdkfd; 1 selects DMA-BUF on kernels without that"

"""Network variables of RCCL, AMD's version of NCCL, on Slingshot.

RCCL reads NCCL's variables. On InfiniBand, RoCE and Ethernet the decisions for NCCL hold. On Slingshot it needs the
plugin aws-ofi-nccl (``librccl-net.so``; before ROCm 7 aws-ofi-rccl) and the settings of libfabric's provider cxi that
HPE and AMD recommend. None of this has been tried on such a machine. Sources:

- OLCF, "PyTorch on Frontier" (docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html, as of ROCm 7.1.1, 2026)
- LUMI, "PyTorch" (lumi-supercomputer.github.io/LUMI-EasyBuild-docs/p/PyTorch, read 2026): NCCL_SOCKET_IFNAME over the
  interfaces hsn0 to hsn3; NCCL_NET_GDR_LEVEL=3, the same as PHB, is the default since ROCm 6.2
- fi_cxi(7) of libfabric 2: what the variables FI_CXI_* do
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpc_train.machine.environment import Variable
from hpc_train.machine.network.facts import NodeFacts
from hpc_train.machine.network.nccl_settings import Setting

_OLCF = "(OLCF, PyTorch on Frontier)"
_SLINGSHOT = (
    ("NCCL_SOCKET_IFNAME", "hsn", "selects the high-speed interfaces instead of the management network"),
    ("NCCL_NET_GDR_LEVEL", "PHB", f"the NICs read the memory of their GPUs; the default since ROCm 6.2 {_OLCF}"),
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
    "the site for amdkfd's peer memory (amdgpu built for the InfiniBand driver); it is up to 3 times faster"
)
# expandable segments came to ROCm after torch 2.11 (pytorch#177974); before, torch warns that it ignores them
_NOT_READ = frozenset({"CUDA_DEVICE_ORDER", "NCCL_MNNVL_ENABLE", "PYTORCH_CUDA_ALLOC_CONF"})


def on_amd(nodes: Sequence[NodeFacts]) -> bool:
    """Returns whether the GPUs of the nodes are AMD's."""
    return any(gpu.amd for facts in nodes for gpu in facts.gpus)


def variables(settings: Mapping[str, Setting]) -> Iterator[Variable]:
    """Yields what a job of several nodes on Slingshot exports.

    Args:
        settings: variables that are already set, by name.
    """
    if "NCCL_NET_PLUGIN" not in settings:  # Frontier's module sets it
        yield Variable("NCCL_NET", "AWS Libfabric", _PLUGIN)
    for name, value, reason in _SLINGSHOT:
        yield Variable(name, value, reason)


def read_by_rccl(variables: Iterable[Variable]) -> list[Variable]:
    """Returns ``variables`` without what RCCL and HIP do not read."""
    return [variable for variable in variables if variable.name not in _NOT_READ]


def not_set(fabric: str) -> Iterator[tuple[str, str]]:
    """Yields common variables that are not set, and the reason."""
    if fabric == "slingshot":
        yield "FI_CXI_RDZV_PROTO", _RENDEZVOUS
    if fabric in ("infiniband", "roce"):
        yield "NCCL_DMABUF_ENABLE", "RCCL reads GPU memory through amdkfd; 1 selects DMA-BUF on kernels without that"

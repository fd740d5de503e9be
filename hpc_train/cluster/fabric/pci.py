"""How far two PCI devices are from each other, from where they stand in ``/sys/devices``."""

from __future__ import annotations

import re
from pathlib import Path

ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def device_path(sysfs: Path, address: str) -> tuple[str, ...]:
    """The host bridge and the bridges down to a device, the device last; () where it is not there.

    ``("pci0000:80", "0000:80:01.1", "0000:81:00.0")``: host bridge, root port, device.
    """
    link = sysfs / "bus/pci/devices" / address
    if not link.exists() and not link.is_symlink():  # a copy may have the link and not what it leads to
        return ()
    parts = link.resolve().parts
    start = next((i for i, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", part)), None)
    if start is None:
        return ()
    return (parts[start], *[part for part in parts[start + 1 :] if ADDRESS.fullmatch(part)])


def way_between(a: tuple[str, ...], b: tuple[str, ...], same_numa: bool | None) -> str | None:
    """nvidia-smi's name for the way between two devices, by their ``device_path``.

    PIX: below one switch. PXB: over several switches below one root port. PHB: through one host bridge. NODE: between
    host bridges of a NUMA node. SYS: between NUMA nodes. None where the paths, or for the last two the NUMA nodes, are
    not known.
    """
    if not a or not b:
        return None
    common = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        common += 1
    if common == 0:
        return None if same_numa is None else "NODE" if same_numa else "SYS"
    if common == 1:
        return "PHB"
    below = max(len(a), len(b)) - common  # 2: a port of the common switch and the device
    return "PIX" if below <= 2 else "PXB"

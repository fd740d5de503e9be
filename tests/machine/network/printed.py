"""Matrices as nvidia-smi prints them, from tables that are short to write and to read."""

from __future__ import annotations

from dataclasses import dataclass

TABS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")  # drivers since 2023; a tab more before the last column
OLD = ("CPU Affinity",)  # before 2020
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe and the interconnect between NUMA nodes
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@dataclass(frozen=True)
class Printed:
    """A table and what is to be read from it.

    Attributes:
        table: a line for each device: its name, the ways to all devices, and behind ``|`` the columns at the side.
        masks: the CPUs of the rank on each GPU; ``-`` where it is not bound.
        cards: the card of each GPU; ``-`` where it is unknown.
        links: some of the links, ``GPU0-GPU1=NV4``.
        unknown: words of a note on what is not known; "" where all that the matrix can say is known.
        columns: the headings at the side.
        names: the cards that the legend names, in the order of NIC0, NIC1, …
    """

    table: str
    masks: str
    cards: str
    links: str = ""
    unknown: str = ""
    columns: tuple[str, ...] = TABS
    names: str = ""
    spaces: bool = False

    @property
    def text(self) -> str:
        rows = [line.partition("|") for line in self.table.strip().splitlines()]
        cells = [row.split() for row, _, _ in rows]
        sides = [[cell.strip() for cell in side.split("|")] if side else [] for _, _, side in rows]
        devices = [row[0] for row in cells]
        legend = "".join(f"  NIC{number}: {name}\n" for number, name in enumerate(self.names.split()))
        body = self._padded(devices, cells, sides) if self.spaces else self._tabbed(devices, cells, sides)
        return "\n".join(body) + "\n" + LEGEND + (f"\nNIC Legend:\n\n{legend}" if legend else "")

    def _tabbed(self, devices: list[str], cells: list[list[str]], sides: list[list[str]]) -> list[str]:
        lines = ["\t" + "\t".join([*devices, *self.columns])]
        for row, side in zip(cells, sides, strict=True):
            apart = [*side[:2], "", *side[2:]] if len(side) > 2 else side
            lines.append("\t".join([row[0], *(f" {way} " if way == "X" else way for way in row[1:]), *apart]))
        return lines

    def _padded(self, devices: list[str], cells: list[list[str]], sides: list[list[str]]) -> list[str]:
        lines = ["".join(f"{word:<8}" for word in ["", *devices]) + "".join(f"{word:<16}" for word in self.columns)]
        for row, side in zip(cells, sides, strict=True):
            ways = "".join(f"{' X' if way == 'X' else way:<8}" for way in row)
            lines.append((ways + "".join(f"{cell:<16}" for cell in side)).rstrip())
        return lines


MATRICES = {
    "four A100, a socket cut into NUMA nodes, a card each and two for storage": Printed(
        """
        GPU0    X    NV4  NV4  NV4  PXB  SYS  SYS  SYS  SYS  SYS | 48-63,112-127 | 3 | N/A
        GPU1    NV4  X    NV4  NV4  SYS  PXB  SYS  SYS  SYS  SYS | 32-47,96-111  | 2 | N/A
        GPU2    NV4  NV4  X    NV4  SYS  SYS  PXB  SYS  SYS  SYS | 16-31,80-95   | 1 | N/A
        GPU3    NV4  NV4  NV4  X    SYS  SYS  SYS  PXB  SYS  SYS | 0-15,64-79    | 0 | N/A
        mlx5_0  PXB  SYS  SYS  SYS  X    SYS  SYS  SYS  SYS  SYS
        mlx5_1  SYS  PXB  SYS  SYS  SYS  X    SYS  SYS  SYS  SYS
        mlx5_2  SYS  SYS  PXB  SYS  SYS  SYS  X    SYS  SYS  SYS
        mlx5_3  SYS  SYS  SYS  PXB  SYS  SYS  SYS  X    SYS  SYS
        mlx5_9  SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS  X    PIX
        mlx5_10 SYS  SYS  SYS  SYS  SYS  SYS  SYS  SYS  PIX  X
        """,
        "48-63,112-127 32-47,96-111 16-31,80-95 0-15,64-79", "mlx5_0 mlx5_1 mlx5_2 mlx5_3", "mlx5_9-mlx5_10=PIX",
    ),
    "two H100 of a socket, hyperthreads, cards by number with a legend that skips": Printed(
        """
        GPU0 X    NV18 PIX  NODE NODE | 0-51,104-155 | 0 | N/A
        GPU1 NV18 X    NODE PIX  NODE | 0-51,104-155 | 0 | N/A
        NIC0 PIX  NODE X    NODE NODE
        NIC1 NODE PIX  NODE X    NODE
        NIC2 NODE NODE NODE NODE X
        """,
        "0-25,104-129 26-51,130-155", "mlx5_0 mlx5_10", "GPU1-mlx5_10=PIX", names="mlx5_0 mlx5_10 mlx5_bond_0",
    ),
    "columns of cards that are not in the order of their numbers": Printed(
        """
        GPU0   X   NV2 PIX PHB | 0-19  | 0 | N/A
        GPU1   NV2 X   PHB PIX | 20-39 | 0 | N/A
        mlx5_2 PIX PHB X   PHB
        mlx5_1 PHB PIX PHB X
        """,
        "0-19 20-39", "mlx5_2 mlx5_1",
    ),
    "cards by number without a legend": Printed(
        """
        GPU0 X    NODE PIX | 0-15 | 0 | N/A
        GPU1 NODE X    SYS | 16-31 | 1 | N/A
        NIC0 PIX  SYS  X
        """,
        "0-15 16-31", "NIC0 NIC0", unknown="the NIC behind NIC0",
    ),
    "a job with one CPU: blank cells": Printed(
        """
        GPU0 X   NV4 PIX  | 0 | 0 | N/A
        GPU1 NV4 X   NODE |   | 1 | N/A
        NIC0 PIX NODE X
        """,
        "0 -", "mlx5_0 mlx5_0", unknown="CPU Affinity of GPU1: blank", names="mlx5_0",
    ),
    "a job with one core for all GPUs, and a range of NUMA nodes": Printed(
        """
        GPU0 X   NV4 | 0,64 | 0-3
        GPU1 NV4 X   | 0,64 | 0-3
        """,
        "- -", "- -", columns=TABS[:2],
    ),
    "blank cells between spaces": Printed(
        """
        GPU0 X   NV4 |  | 0
        GPU1 NV4 X   |  | 1
        """,
        "- -", "- -", unknown="CPU Affinity of GPU0: blank", columns=TABS[:2], spaces=True,
    ),
    "NUMA N/A between spaces": Printed(
        """
        GPU0 X   NV2 | 0-23 | N/A
        GPU1 NV2 X   | 0-23 | N/A
        """,
        "0-11 12-23", "- -", "GPU0-GPU1=NV2", "NUMA Affinity of GPU0: N/A", TABS[:2], spaces=True,
    ),
    "the old name of SYS, and no NUMA column": Printed(
        """
        GPU0   X   PHB SOC SOC SOC | 0-5
        GPU1   PHB X   SOC SOC SOC | 0-5
        GPU2   SOC SOC X   PHB PHB | 6-11
        GPU3   SOC SOC PHB X   PHB | 6-11
        mlx4_0 SOC SOC PHB PHB X
        """,
        "0-2 3-5 6-8 9-11", "mlx4_0 mlx4_0 mlx4_0 mlx4_0", "GPU0-mlx4_0=SYS", "NUMA Affinity", OLD,
    ),
    "one GPU": Printed("GPU0 X | 0-15 | 0 | N/A", "0-15", "-"),
    "one GPU and its card": Printed(
        """
        GPU0 X PHB | 0-7 | 0
        mlx5_0 PHB X
        """, "0-7", "mlx5_0", columns=TABS[:2],
    ),
    "Grace: NUMA nodes of GPU memory, and cards that are all as far": Printed(
        """
        GPU0 X    NV18 SYS SYS | 0-71   | 0,2-9   | 2
        GPU1 NV18 X    SYS SYS | 72-143 | 1,10-17 | 10
        NIC0 SYS  SYS  X   SYS
        NIC1 SYS  SYS  SYS X
        """,
        "0-71 72-143", "- -", "GPU0-mlx5_0=SYS", names="mlx5_0 mlx5_1",
    ),
    "POWER9: four hyperthreads to a core, side by side": Printed(
        """
        GPU0   X    NV3  SYS  NODE SYS  | 0-63
        GPU1   NV3  X    SYS  NODE SYS  | 0-63
        GPU2   SYS  SYS  X    SYS  NODE | 64-127
        mlx5_0 NODE NODE SYS  X    SYS
        mlx5_3 SYS  SYS  NODE SYS  X
        """,
        "0-31 32-63 64-127", "mlx5_0 mlx5_0 mlx5_3", unknown="NUMA Affinity", columns=OLD,
    ),
    "six GPUs on one socket and two on the other": Printed(
        """
        GPU0 X   PHB NODE SYS | 0-5,12-17  | 0 | N/A
        GPU1 PHB X   NODE SYS | 0-5,12-17  | 0 | N/A
        GPU2 NODE NODE X  SYS | 0-5,12-17  | 0 | N/A
        GPU3 SYS SYS SYS  X   | 6-11,18-23 | 1 | N/A
        """,
        "0-1,12-13 2-3,14-15 4-5,16-17 6-11,18-23", "- - - -",
    ),
    "a virtual machine with as many NUMA nodes as none": Printed(
        """
        GPU0 X   PHB PHB | 0-6 | 0 | N/A
        GPU1 PHB X   PHB | 0-6 | 0 | N/A
        GPU2 PHB PHB X   | 0-6 | 0 | N/A
        """,
        "0-2 3-4 5-6", "- - -",
    ),
    "V100 in a cube: some pairs have NVLinks, some the way between sockets": Printed(
        """
        GPU0 X   NV1 NV2 SYS | 0-9   | 0 | N/A
        GPU1 NV1 X   SYS NV2 | 0-9   | 0 | N/A
        GPU2 NV2 SYS X   NV1 | 10-19 | 1 | N/A
        GPU3 SYS NV2 NV1 X   | 10-19 | 1 | N/A
        """,
        "0-4 5-9 10-14 15-19", "- - - -", "GPU0-GPU2=NV2 GPU0-GPU3=SYS GPU1-GPU2=SYS",
    ),
    "EFA: cards by their place, two to a GPU": Printed(
        """
        GPU0      X    NV18 PIX PIX SYS | 0-47  | 0 | N/A
        GPU1      NV18 X    SYS SYS PIX | 48-95 | 1 | N/A
        rdmap79s0 PIX  SYS  X   PIX SYS
        rdmap80s0 PIX  SYS  PIX X   SYS
        rdmap96s0 SYS  PIX  SYS SYS X
        """,
        "0-47 48-95", "rdmap79s0 rdmap96s0",
    ),
    "cards of other makers": Printed(
        """
        GPU0     X    SYS PXB SYS | 0-3 | 0 | N/A
        GPU1     SYS  X   SYS PXB | 4-7 | 1 | N/A
        irdma0   PXB  SYS X   SYS
        bnxt_re1 SYS  PXB SYS X
        """,
        "0-3 4-7", "irdma0 bnxt_re1",
    ),
    "two cells that contradict each other": Printed(
        """
        GPU0   X   PXB SYS | 0-3 | 0 | N/A
        GPU1   PXB X   PIX | 4-7 | 1 | N/A
        mlx5_0 PIX PIX X
        """,
        "0-3 4-7", "- mlx5_0", "GPU0-GPU1=PXB", "GPU0 and mlx5_0: PIX or SYS",
    ),
}  # fmt: skip

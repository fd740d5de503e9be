"""The kernel's counters of network cards, read from trees as sysfs has them."""

from __future__ import annotations

from pathlib import Path

from hpc_train.machine.kernel_counters import Traffic, read_traffic


def write(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")


def test_all_cards_of_a_node_count(tmp_path: Path) -> None:
    for card, words in (("mlx5_0", 10), ("mlx5_1", 5)):
        write(tmp_path / f"class/infiniband/{card}/ports/1/counters", port_xmit_data=words, port_rcv_data=2 * words)
    for card in ("eth0", "eth1", "veth7"):
        write(tmp_path / f"class/net/{card}/statistics", tx_bytes=100, rx_bytes=7)
    for card in ("eth0", "eth1"):  # the virtual one has no device
        (tmp_path / f"class/net/{card}/device").mkdir()
    assert read_traffic(tmp_path) == Traffic(60, 120, 200, 14)


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    assert read_traffic(tmp_path) == Traffic()
    write(tmp_path / "class/infiniband/mlx5_0/ports/1/counters", port_xmit_data=1, port_rcv_data="N/A")
    write(tmp_path / "class/infiniband/mlx5_1/ports/1/counters", port_rcv_data=1)
    assert read_traffic(tmp_path) == Traffic()


def test_traffic_since_and_a_counter_that_was_set_back() -> None:
    assert Traffic(5, 6, None, 10).since(Traffic(1, 1, 1, 11)) == Traffic(4, 5, None, None)

"""Where the sockets of an attempt listen, and what of an attempt is recorded for everybody."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace

import pytest

from benchmarks.scale import MODEL
from hpc_train.config.schema import Config
from hpc_train.elastic.rendezvous.addresses import AttemptSpec, bind
from hpc_train.elastic.rendezvous.store import serve
from hpc_train.layout.resolve import resolve_layout
from hpc_train.machine.allocation import Allocation
from hpc_train.run.directory import RunDirectory
from hpc_train.run.files import read_json

NODE = Allocation(2, 0, "n1", "7", "7.0.0", "127.0.0.3", ("n1", "n2"), "127.0.0.3")
LAYOUT = resolve_layout(Config(model=MODEL), 1, 2)
SPEC = AttemptSpec(3, "7.0.0", "7", "n1", 1, 0.0, "n1", 1, 1, 0, 2, LAYOUT, (0,), {}, "random", 60, 1)


def test_sockets_listen_only_on_the_address_of_the_job() -> None:
    with bind(NODE, "seed") as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.3", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    with bind(replace(NODE, listen_address=""), "seed") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_an_address_that_is_gone_is_not_called_a_port_that_is_taken() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.7: .*[Cc]annot assign"):
        bind(replace(NODE, listen_address="203.0.113.7"), "seed")


@pytest.mark.parametrize("address", ["127.0.0.3", ""])
def test_the_store_serves_on_the_address_of_the_job(address: str) -> None:
    from torch.distributed import PrefixStore, TCPStore

    store = serve(bind(replace(NODE, listen_address=address), f"store {address}"))
    client = PrefixStore("random", TCPStore(address or "127.0.0.1", store.port, wait_for_workers=False))
    client.set("key", "value")
    assert client.get("key") == b"value"
    if address:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", store.port))


def test_the_prefix_of_the_keys_is_not_recorded(run: RunDirectory) -> None:
    SPEC.publish(run)
    recorded = read_json(run.attempts / "003.json")
    assert "random" not in str(recorded)
    assert recorded.keys() == asdict(SPEC).keys() - {"store_prefix"}

"""The server of torch's key-value store, in a process of its own."""

from __future__ import annotations

import socket

import torch.distributed as dist


def serve(listener: socket.socket) -> dist.TCPStore:
    """Serves on the listening socket ``listener`` as long as the returned object lives."""
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

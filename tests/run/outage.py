"""Makes a folder of a run unavailable for a while, as if its file system were lost; this also affects root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def detachable(folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Replaces ``folder`` by a symbolic link and returns a context manager that breaks the link.

    No file in the folder can be opened or created inside its ``with`` block. An outage begins and ends with one rename,
    so that no file can be created in between.
    """
    real, away = folder.with_name(f"{folder.name}.real"), folder.with_name(f"{folder.name}.away")
    folder.rename(real)
    folder.symlink_to(real)

    @contextmanager
    def outage() -> Iterator[None]:
        real.rename(away)
        try:
            yield
        finally:
            away.rename(real)

    return outage

"""A folder of a run whose file system is away for a while, also for root."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def detachable(folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Makes ``folder`` a link. Inside what this returns it points nowhere: no file in it can be opened or made.

    An outage begins and ends by one rename, so that no file is made in between.
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

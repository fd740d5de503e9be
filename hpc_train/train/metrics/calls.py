"""Names the user's class or function, its method and the user's line in the errors of a call."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.run.exits import CollectiveFailure, UnfitNode

_UNCHANGED = (UserError, CollectiveFailure, UnfitNode, MemoryError)  # their types decide what the agent does
_PACKAGE = Path(__file__).parents[2]


class CallFailed(RuntimeError):
    """Reports an error in a metric or hook; its cause is the error itself."""


@contextmanager
def named_errors(title: str, method: str, step: int | None = None) -> Iterator[None]:
    """Names the callee in the errors of this context.

    Args:
        title: what is called, such as ``hook mine (mylab.Hook)``.
        step: the number of completed steps.

    Raises:
        CallFailed: an error of another type than those of ``_UNCHANGED`` was raised.
    """
    try:
        yield
    except (CallFailed, *_UNCHANGED):
        raise
    except Exception as error:
        after = "" if step is None else f" after step {step}"
        what = f"{title} failed in {method}{after}: {type(error).__name__}: {error}"
        raise CallFailed(f"{what} ({_user_line(error)})") from error


def _user_line(error: BaseException) -> str:
    """Returns file and line of the innermost frame that is neither in hpc_train nor in an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_foreign(Path(frame.filename))]
    found = (own or frames)[-1]
    return f"{found.filename}:{found.lineno}"


def _is_foreign(path: Path) -> bool:
    return path.is_relative_to(_PACKAGE) or "site-packages" in path.parts or path.name.startswith("<")

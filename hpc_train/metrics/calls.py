"""Imports a user's class or function and calls it so that an error names it, its method and the user's line."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.run.exits import CollectiveFailure, UnfitNode

_UNCHANGED = (UserError, CollectiveFailure, UnfitNode, MemoryError)  # their types decide what the agent does
_PACKAGE = Path(__file__).parents[1]


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


def located(path: str, where: str) -> Callable[..., Any]:
    """Imports a class or function by its dotted path, which may end in an attribute of a class.

    Raises:
        UserError: it cannot be imported or called.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module + ".").startswith(error.name + "."):
                continue  # a shorter path may be the module
            raise _not_imported(path, error, where) from error
        except Exception as error:
            raise _not_imported(path, error, where) from error
        for name in parts[cut:]:
            if not hasattr(found, name):
                raise _not_imported(path, f"{module} has no {'.'.join(parts[cut:])}", where)
            found = getattr(found, name)
        if callable(found):
            return found  # type: ignore[no-any-return]
        raise _not_imported(path, f"it is a {type(found).__name__}, which cannot be called", where)
    raise _not_imported(path, f"there is no module {'.'.join(parts[:-1]) or path}", where)


def _not_imported(path: str, reason: object, where: str) -> UserError:
    detail = f"{type(reason).__name__}: {reason}" if isinstance(reason, Exception) else str(reason)
    missing = isinstance(reason, ModuleNotFoundError) and reason.name == "torchmetrics"
    fix = "package.module.Name, importable where the workers run (installed, or in the directory of the call)"
    return UserError(
        f"{path!r} cannot be imported: {detail}",
        where=f"{where}._target_",
        fix="pip install 'hpc_train[metrics]'" if missing else fix,
    )

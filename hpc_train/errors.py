"""The exception for a user's mistake, and the suggestion of the nearest allowed value."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Reports a wrong setting or input that was found before anything was started (exit code 2).

    Args:
        what: what is wrong, with the offending value.
        where: the config key, file or option that sets it, e.g. ``batch.global_size``.
        fix: what to change, concretely.
        jobs: the numbers of the jobs of a sweep that are refused for it; empty if it concerns the whole command.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", jobs: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        self.jobs = jobs

    def as_json(self) -> dict[str, Any]:
        """Returns the object that ``--json`` prints."""
        named = {"jobs": [*self.jobs]} if self.jobs else {}
        return {"what": self.what, "where": self.where, "fix": self.fix, **named}

    def __str__(self) -> str:
        text = self.what
        if self.where:
            text += f"\n  set in: {self.where}"
        if self.fix:
            text += f"\n  fix:    {self.fix}"
        return text


class UserErrors(UserError):
    """Reports several mistakes that do not depend on each other, in one message.

    Attributes:
        found: the mistakes, none of which is a ``UserErrors``.
        head: the first line of the message; None counts the mistakes.
        most: the number of mistakes in the message.
    """

    def __init__(self, found: Iterable[UserError], head: str | None = None, most: int | None = None) -> None:
        self.found = tuple(found)
        self.head = head
        self.most = most
        super().__init__("\n".join([head or f"{len(self.found)} mistakes:", *map(str, self.found[:most])]))


class Mistakes:
    """Collects the mistakes that several checks find, so that one message reports them all."""

    def __init__(self) -> None:
        self._found: list[UserError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collects a ``UserError`` that is raised inside the ``with`` block, and continues after it."""
        try:
            yield
        except UserErrors as error:
            self._found += error.found
        except UserError as error:
            self._found.append(error)

    def report(self) -> None:
        """Raises the collected mistakes, if there are any.

        Raises UserError for one mistake, and ``UserErrors`` for several; a mistake that occurs twice is listed once.
        """
        mistakes = [*{str(mistake): mistake for mistake in self._found}.values()]
        if len(mistakes) == 1:
            raise mistakes[0]
        if mistakes:
            raise UserErrors(mistakes)


def check_all(*checks: Callable[[], object]) -> None:
    """Calls all ``checks``, which do not depend on each other.

    Raises UserError if any check raises one; its message reports the mistakes of all checks.
    """
    mistakes = Mistakes()
    for check in checks:
        with mistakes.collected():
            check()
    mistakes.report()


class UserCodeError(RuntimeError):
    """Reports an exception in the code of a user. The message is shown alone, without a traceback of hpc_train."""

    @classmethod
    def of(cls, what: str, error: BaseException) -> UserCodeError:
        """Returns an exception whose message begins with ``what``, the purpose of the call, and ends with the traceback
        of ``error``, without the frames of hpc_train that called the code.
        """
        frames = error.__traceback__
        while frames is not None and Path(frames.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
            frames = frames.tb_next
        text = traceback.format_exception(type(error), error, frames or error.__traceback__)
        return cls(f"{what}: {error!r}\n{''.join(text).rstrip()}")


_PACKAGE = Path(__file__).parent


# the name of an option in other tools and papers -> names of hpc_train; the first that is allowed is proposed
OTHER_NAMES = {
    "1f1b": ("pp",),
    "3d": ("hybrid3d",),
    "amp": ("bf16",),
    "context": ("cp",),
    "bf16-mixed": ("bf16",),
    "data_parallel": ("dp",),
    "ddp": ("dp",),
    "deepspeed": ("zero3",),
    "fsdp": ("zero3",),
    "float16": ("fp16",),
    "float32": ("fp32",),
    "fsdp2": ("zero3",),
    "gpipe": ("pp",),
    "half": ("fp16",),
    "horovod": ("dp",),
    "imagenet": ("images",),
    "iou": ("miou",),
    "lion": ("custom",),
    "megatron": ("hybrid3d",),
    "mixed": ("bf16",),
    "none": ("single",),
    "pipeline": ("pp",),
    "ring_attention": ("cp", "ring"),
    "tensor": ("tp",),
    "tensor_parallel": ("tp",),
    "torchrun": ("local",),
    "ulysses": ("cp",),
}


def nearest(value: object, allowed: Sequence[str]) -> str:
    """Returns ``did you mean X? (X | Y | Z)``, or only the allowed values if none is similar to ``value``."""
    choices = " | ".join(allowed)
    if len(allowed) < 2:
        return choices
    close = closest(str(value), allowed)
    return f"did you mean {close}? ({choices})" if close else f"one of {choices}"


def closest(value: str, allowed: Sequence[str]) -> str | None:
    """Returns the allowed value that ``value`` probably means: another name for it, its beginning or end, or one with
    nearly the same letters, in upper or lower case.
    """
    lower = {name.lower(): name for name in allowed}
    word = value.lower()
    same = [name for name in (word, *OTHER_NAMES.get(word, ())) if name in lower]
    parts = [name for name in lower if len(word) > 2 and (name.startswith(word) or name.endswith(word))]
    close = [*same, *difflib.get_close_matches(word, lower, n=1), *parts]
    return lower[close[0]] if close else None

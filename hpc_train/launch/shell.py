"""Text of bash in which a value of the config is always one word, and never a line or a command of its own.

A batch script is text, and ``sbatch`` and bash read it by lines. So a value may not contain a line break as such:
``shell_word`` writes it as an escape, and comments lose it. An option of sbatch with a line break is refused (see
``launch.sbatch.arguments``).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from hpc_train.errors import UserError
from hpc_train.machine.environment import job_environment


def shell_word(value: str) -> str:
    """Returns ``value`` as one word of bash on one line.

    Raises:
        UserError: it contains a NUL character, which no argument or variable can hold.
    """
    if "\0" in value:
        raise UserError(
            f"{value!r} contains a NUL character", where="the config", fix="remove it; programs cannot receive it"
        )
    return shlex.quote(value) if value.isprintable() else f"$'{''.join(map(_escaped, value))}'"


def shell_command(parts: Sequence[str]) -> str:
    """Returns ``parts`` as a command of bash on one line."""
    return " ".join(map(shell_word, parts))


def exports(variables: Mapping[str, str]) -> list[str]:
    """Returns the lines that export ``cluster.env``.

    Raises:
        UserError: a name is not that of a variable, or a value contains a NUL character.
    """
    return [f"export {name}={shell_word(value)}" for name, value in job_environment(variables).items()]


def comment(text: str) -> str:
    """Returns a line with ``text`` as a comment."""
    return f"# {''.join(char if char.isprintable() else ' ' for char in text)}"


def own_lines(lines: Iterable[str], key: str) -> list[str]:
    """Returns the lines of bash that the user has set as ``key``, of which each may have several lines.

    Raises:
        UserError: they contain a character with which sbatch refuses a script.
    """
    text = list(lines)
    for line in text:
        if "\0" in line or "\r" in line:
            raise UserError(
                f"{key} has a carriage return or NUL character: {line!r}",
                where=key,
                fix="remove it; a file with Windows line ends is converted by dos2unix",
            )
    return text


def setup_lines(lines: Iterable[str]) -> list[str]:
    """Returns the lines of ``cluster.setup``. Bash goes on after a line that fails, and so the line is named.

    Raises:
        UserError: as ``own_lines``.
    """
    own = own_lines(lines, "cluster.setup")
    # the line of the script and not BASH_COMMAND, which is a command inside of a function such as `module`
    report = """failed=$? line=$(sed -n "${LINENO}p" "$0" 2> /dev/null)"""
    report = f"""trap '{report}; echo "cluster.setup: a line failed with status $failed: $line" >&2' ERR"""
    ended = """trap 'code=$?; [ -n "$set_up" ] || echo "cluster.setup ended the job with status $code" >&2' EXIT"""
    return ["# setup", report, "set_up=", ended, *own, "trap - ERR", "set_up=yes"] if own else []


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "'\\":
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))

"""The parser of a command's own options: a wrong option is a ``UserError``, and the help has no markup."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from hpc_train.errors import UserError, nearest


class OptionParser(argparse.ArgumentParser):
    """Parses the options of a command. A mistake is a ``UserError`` with the words that are allowed, instead of the
    usage and ``SystemExit``.
    """

    def format_help(self) -> str:
        return super().format_help().replace("``", "`")  # a description may be a docstring

    def error(self, message: str) -> NoReturn:
        """Raises UserError with the message of argparse and what to write instead."""
        fix = f"`{self.prog} --help` lists the arguments"
        where = "the command line"
        choice = re.fullmatch(r"argument (.+): invalid choice: (.+) \(choose from (.*)\)", message)
        if choice is not None:
            option = choice[1] if choice[1].startswith("-") else self.prog
            fix = nearest(choice[2].strip("'"), [word.strip(" '") for word in choice[3].split(",")])
            raise UserError(f"{option} does not accept {choice[2]}", where=where, fix=fix)
        value = re.fullmatch(r"argument (?:.*/)?(-[\w-]+): expected one argument", message)
        if value is not None:
            fix = f"{value[1]}='VALUE', with an equals sign if the value begins with a dash"
        unknown = re.fullmatch(r"unrecognized arguments: (-[\w-]+).*", message)
        if unknown is not None:
            fix = nearest(unknown[1], [word for action in self._actions for word in action.option_strings])
        raise UserError(f"{self.prog}: {message}", where=where, fix=fix)

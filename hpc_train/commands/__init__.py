"""The commands of ``python -m hpc_train``, one per module.

A command is a function ``main(arguments: list[str]) -> int`` that returns an exit code (``run/exits.py``) and raises
``UserError`` for a user's mistake; ``cli.py`` imports the module only when the command is called.
"""

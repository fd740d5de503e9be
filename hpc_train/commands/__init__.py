"""What a person types after ``python -m hpc_train``: each module of this package is one command.

A command is a function ``main(arguments: list[str]) -> int`` that returns an exit code (``run/exits.py``) and raises
``UserError`` for a user's mistake; ``cli.py`` imports the module only when the command is called.
"""

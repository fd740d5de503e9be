"""The commands of ``python -m hpc_train``.

A command is a function of ``arguments: list[str]`` that returns an exit code (``run/exits.py``) and raises
``UserError`` for a user's mistake. ``cli.py`` imports its module only when the command is called.
"""

# the name on the command line -> the function, as "module:function"
COMMANDS = {
    "agent": "agent:start_agent",
    "bench": "bench:main",
    "cancel": "submitted:cancel",
    "checkpoint": "checkpoint:main",
    "doctor": "doctor:main",
    "evaluate": "evaluate:main",
    "freeze": "batch:freeze_run",
    "generate": "generate:main",
    "logs": "logs:main",
    "prepare": "prepare:main",
    "resume": "submitted:resume",
    "retry": "submitted:retry",
    "script": "batch:print_script",
    "stacks": "submitted:stacks",
    "status": "status:main",
    "train": "train:main",
    "wait": "submitted:wait",
    "why": "why:main",
}

"""Cannot be imported: the module of a worker entry, for the tests of the agent."""

import os

if "CRASH" in os.environ:
    os.abort()
raise ValueError(f"PYTORCH_JIT must be 0 or 1, not {os.environ['PYTORCH_JIT']}")

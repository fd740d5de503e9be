"""What the forkserver of the ranks imports before it forks the first of them.

Without it, every rank would import these modules itself: half a second each, a second for the compiler. The collector
finds nothing in what the imports make, so it does not run until they are done, nor when the forkserver ends: both take
half a second each, in every process of a test session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os

gc.disable()
for name in (
    "torch.distributed.pipelining",
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "hpc_train.train.worker",
    "pytest",
    "tests.config.composing",
):
    with contextlib.suppress(ImportError):  # one that another version of torch does not have
        importlib.import_module(name)
gc.freeze()
gc.enable()
atexit.register(os._exit, 0)

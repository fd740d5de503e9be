"""Imports what the workers need, as the first module that the warm parent imports.

Garbage collection is disabled first, which makes the imports a fifth faster. Workers are forked with the
collector off and switch it on again (``hpc_train.elastic.worker_process``).

What workers need only after their first lines is imported once the first ones have been forked, for those that are
forked after a failure. The first ones import it themselves, as late as they need it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
from dataclasses import dataclass

from hpc_train.elastic.warm_parent.head_start import IMPORTS

LATER = "torch._dynamo"  # optimizers and DDP import it; it takes 0.3 s
PAUSE_S = 2.0  # after a fork, in which the worker itself imports LATER


def import_modules(names: str) -> BaseException | None:
    """Imports the modules ``names``, separated by commas; returns the exception that ended this, if any."""
    try:
        for name in filter(None, names.split(",")):
            importlib.import_module(name)
    except BaseException as error:  # also an exit; the workers report it
        return error
    return None


@dataclass
class LaterImports:
    """Imports ``modules`` in this process when it has forked, and then not again for ``pause_s`` seconds.

    It is done in the handler of a timer, which does not disturb the forkserver: that waits for requests in ``select``.
    """

    modules: str
    pause_s: float

    def prepare(self) -> None:
        signal.signal(signal.SIGALRM, self._import)
        os.register_at_fork(after_in_parent=self._start_timer, after_in_child=self._forget)

    def _start_timer(self) -> None:
        if self.modules:
            signal.setitimer(signal.ITIMER_REAL, self.pause_s)

    def _import(self, number: int, frame: object) -> None:
        modules = self.modules
        self.modules = ""
        import_modules(modules)  # if it fails, the workers report it

    def _forget(self) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self.modules = ""


gc.disable()
failure = import_modules(os.environ.pop(IMPORTS, ""))
LaterImports(LATER, PAUSE_S).prepare()

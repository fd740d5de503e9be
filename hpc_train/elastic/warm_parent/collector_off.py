"""Stops garbage collection before the imports of the warm parent, which makes them a fifth faster.

Workers are forked with the collector off and switch it on again (``hpc_train.elastic.worker_process``).
"""

from __future__ import annotations

import gc

gc.disable()

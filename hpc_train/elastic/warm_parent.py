"""The first import of the warm parent: it collects no garbage, which makes its imports a fifth faster.

Workers are forked with the collector off and switch it on again (``hpc_train.elastic.worker_process``).
"""

from __future__ import annotations

import gc

gc.disable()

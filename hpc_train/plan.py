"""Keeps earlier names of modules, such as ``hpc_train.plan.techniques`` for ``hpc_train.layout.techniques``."""

import sys

from hpc_train.layout import orders, techniques, validate

for _module in (orders, techniques, validate):
    sys.modules[_module.__name__.replace("hpc_train.layout", __name__)] = _module

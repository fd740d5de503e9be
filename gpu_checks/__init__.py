"""Checks on real GPUs what the other tests can only check on CPUs: ``python -m gpu_checks --budget 560 --out DIR``.

Nothing here needs pytest, wandb or a checkout with ``.git``. See ``CONTRIBUTING.md`` for a machine without network.
"""

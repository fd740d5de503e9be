"""``python -m gpu_checks``: runs the checks, prints a table, and exits with 1 if one has failed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gpu_checks.check import Place
from gpu_checks.checks import BY_NAME, PLANS, checks_for
from gpu_checks.runner import Runner, find_machine, scratch_folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_checks", description="Checks what only a GPU can show.")
    parser.add_argument("--budget", type=float, default=560, metavar="S", help="seconds in all (default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--plan", choices=PLANS, help="the checks of one kind of visit, in the order of their value")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these checks, also if they have passed")
    parser.add_argument("--cpu", action="store_true", help="do not use the GPUs")
    parser.add_argument(
        "--cpu-ranks", type=int, default=0, metavar="N", help="on the CPU, run the checks for several GPUs on N ranks"
    )
    options = parser.parse_args()
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    machine = find_machine()
    checks = PLANS[options.plan] if options.plan else checks_for(machine["gpus"])
    if options.only:
        unknown = set(options.only) - set(BY_NAME)
        if unknown:
            parser.error(f"no such check: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
        checks = tuple(BY_NAME[name] for name in options.only)
    with scratch_folder() as scratch:
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):  # a later check finds what an earlier one compiled
            os.environ.setdefault(name, str(scratch / name.lower()))
        place = Place(options.out.resolve(), scratch, machine["gpus"], options.cpu_ranks)
        return 0 if Runner(place, machine, options.budget, again=bool(options.only)).run(checks) else 1


if __name__ == "__main__":
    sys.exit(main())

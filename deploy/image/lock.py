"""Prints the lock file of an image: the packages that hpc_train needs, with the version and the hash of each file.

    python3.11 deploy/image/lock.py [EXTRA ...] >deploy/image/cpu.lock

pip resolves them with the versions of ``constraints.txt``, for the Python and the processor on which this runs. It
installs nothing, but may download packages (3 GB with CUDA). ``PIP_FIND_LINKS`` names the place of torch, as
``--wheels`` of ``build.sh`` does. Without it, PyPI's torch is taken, which has CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = (3, 11)  # of the Debian of build.sh


def main(extras: list[str]) -> None:
    if sys.version_info[:2] != PYTHON:
        sys.exit(f"lock.py: the image has Python 3.11, and this is {sys.version.split()[0]}: run python3.11 lock.py")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    project = f"{REPOSITORY}[{','.join(extras)}]" if extras else str(REPOSITORY)
    needed = ["-c", str(REPOSITORY / "constraints.txt"), project, "setuptools"]  # setuptools builds what has no wheel
    done = subprocess.run([*pip, *needed], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)
    for package in sorted(json.loads(done.stdout)["install"], key=lambda package: package["metadata"]["name"].lower()):
        archive = package["download_info"].get("archive_info")
        if archive is not None:  # hpc_train is a directory
            metadata = package["metadata"]
            print(f"{metadata['name']}=={metadata['version']} --hash=sha256:{archive['hashes']['sha256']}")


if __name__ == "__main__":
    main(sys.argv[1:])

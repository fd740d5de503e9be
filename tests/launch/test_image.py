"""The image of deploy/image: its lock files fit the project, and what is built from the page of the docs trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpc_train.version import __version__
from tests.doors.command import REPOSITORY, environment, lines_of_pages

IMAGE = REPOSITORY / "deploy" / "image"
FABRICS = sorted(path.name for path in (IMAGE / "fabric").iterdir())
NEEDED = pytest.mark.skipif(
    shutil.which("mmdebstrap") is None or shutil.which("buildah") is None,
    reason="needs mmdebstrap and buildah: apt-get install mmdebstrap buildah uidmap",
)


def build(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [IMAGE / "build.sh", *arguments]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", sorted(IMAGE.glob("*.lock")), ids=lambda path: path.name)
def test_a_lock_file_has_the_tested_version_of_each_package_that_hpc_train_needs(path: Path) -> None:
    rows = re.findall(r"^(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}$", path.read_text(), flags=re.MULTILINE)
    assert len(rows) == len(path.read_text().splitlines())
    locked = {canonicalize_name(name): version.partition("+")[0] for name, version in rows}
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert locked == locked | {name: version for name, version in pinned.items() if name in locked}
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    for needed in map(Requirement, listed):
        assert locked[canonicalize_name(needed.name)] in needed.specifier


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fabric", "myrinet"], f"--fabric myrinet is unknown; there are: {' '.join(FABRICS)}"),
        (["--lock"], "--lock needs a value"),
        (["--cuda"], "unknown argument --cuda"),
    ],
)
def test_a_mistake_is_refused_with_the_fix(arguments: list[str], message: str) -> None:
    done = build(*arguments)
    assert done.returncode != 0 and message in done.stderr


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = build(PATH=str(tmp_path))
    assert done.returncode == 2
    assert "mmdebstrap buildah newuidmap not found. On Debian: apt-get install mmdebstrap buildah uidmap" in done.stderr


@NEEDED
@pytest.mark.timeout(3600)
@pytest.mark.long_form(600)  # in no share: Debian's packages and wheels come from their indexes
def test_the_image_that_the_page_builds_trains_on_two_ranks() -> None:
    lines = [line for page, line in lines_of_pages("bash") if page == "docs/howto/image.md"]
    wheels = os.environ.get("PIP_FIND_LINKS")  # a machine without PyTorch's index has its wheels here
    if wheels:
        lines[0] += f" --wheels {wheels}"
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"hpc_train {__version__} (" in done.stdout
    assert "done: 4 steps" in done.stdout

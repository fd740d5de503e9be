"""The tests of a room are those of its folder, and those in one process whose imports reach it."""

from __future__ import annotations

import pytest

from tests.structure.room import files_of, rooms


def test_the_tests_of_a_room() -> None:
    files = files_of("launch")
    assert {"tests/launch/test_script.py", "tests/launch/test_detach.py"} <= {*files}, "those of its folder"
    assert "tests/bad_input/test_refused.py" not in files, "it starts processes"
    assert [file for file in files if not file.startswith("tests/launch/")], "others import it"
    assert not [file for file in files if file.startswith(("tests/slurm/", "tests/models/"))]


def test_a_room_that_does_not_exist_is_named() -> None:
    assert {"config", "launch", "train"} <= {*rooms()}
    with pytest.raises(ValueError, match=r"there is no room lunch; one of .*launch"):
        files_of("lunch")

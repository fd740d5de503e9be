"""Names of nodes in Slurm's short form."""

from __future__ import annotations

import pytest

from hpc_train.machine.allocation import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3,07],login", "n1 n2 n3 n07 login"),
        ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
        ("r[1-2]c[3,5]-ib", "r1c3-ib r1c5-ib r2c3-ib r2c5-ib"),
    ],
)
def test_expand(text: str, names: str) -> None:
    assert expand(text) == names.split()

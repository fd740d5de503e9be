"""The profiles of conf/cluster/fabric: each composes, is valid, and reaches the environment of the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.conf_files import config_directory, packaged
from hpc_train.config.schema import FabricConfig
from hpc_train.errors import UserError
from hpc_train.layout.validate import check_values
from hpc_train.machine.network.decision import FabricJob, decide, site_profile
from hpc_train.machine.network.facts import Gpu, NodeFacts, Setting
from hpc_train.machine.network.nccl_settings import RENAMED
from tests.config.composing import config_of

FABRIC = config_directory() / "cluster" / "fabric"
PROFILES = sorted(path.stem for path in FABRIC.glob("*.yaml"))
NODE = NodeFacts(gpus=(Gpu(0),))


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_reaches_the_environment_and_the_user_wins(name: str) -> None:
    config = config_of("cluster=slurm")
    config.cluster.fabric = FabricConfig(**packaged(f"cluster/fabric/{name}"))
    check_values(config)
    asked = dict(config.cluster.fabric.variables)
    assert config.cluster.fabric.name == name and (name == "none") == (not asked)
    assert name == "none" or "# Source: https://" in (FABRIC / f"{name}.yaml").read_text()
    assert not set(asked) & set(RENAMED)
    job = FabricJob(2, 1, profile=site_profile(config.cluster.fabric))
    decided = {variable.name: variable for variable in decide([NODE, NODE], job, {}).variables}
    assert {key: decided[key].value for key in asked} == asked
    assert all(f"the site profile {name}" in decided[key].reason for key in asked)
    users = {key: Setting(key, "7", "/etc/nccl.conf") for key in asked}
    assert not set(asked) & {variable.name for variable in decide([NODE, NODE], job, users).variables}


def test_a_sites_own_file_chooses_its_profile(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text(
        "defaults:\n  - slurm\n  - override fabric: separate_rails\n  - _self_\npartition: gpu\n"
    )
    search = f"hydra.searchpath=[file://{tmp_path}]"
    config = config_of("cluster=ours", search)
    assert (config.cluster.partition, config.cluster.fabric.name) == ("gpu", "separate_rails")
    assert config_of("cluster=ours", "cluster/fabric=none", search).cluster.fabric.variables == {}


@pytest.mark.parametrize(("variable", "fix"), [("LD_PRELOAD=x", "cluster.env"), ("NCCL_DEBUG=", "or remove the key")])
def test_what_is_no_profile_is_refused(variable: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        check_values(config_of(f"+cluster.fabric.variables.{variable}"))
    assert fix in refused.value.fix and "cluster.fabric.variables" in refused.value.where

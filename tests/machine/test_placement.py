"""There is one agent per node; a process that was started twice on a node ends with one message from the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train import cli
from hpc_train.errors import UserError
from hpc_train.machine.allocation import misplaced, refuse_misplaced
from hpc_train.run.directory import RunDirectory
from tests.doors.command import TINY, environment, hpc_train

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "variables",
    [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, {"WORLD_SIZE": "2"}],
)
def test_one_process_per_node_is_right(variables: dict[str, str]) -> None:
    assert misplaced(variables) is None


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1"},
        TORCHRUN | {"RANK": "1", "TORCHELASTIC_RUN_ID": "x"},
    ],
)
def test_the_others_leave_without_a_word(variables: dict[str, str]) -> None:
    with pytest.raises(SystemExit) as end:
        refuse_misplaced(variables)
    assert end.value.code == 2


def test_variables_that_something_else_has_left_are_named_whatever_the_rank() -> None:
    with pytest.raises(UserError, match="left over from something else: unset RANK"):
        refuse_misplaced(TORCHRUN | {"RANK": "3"})


def test_a_config_for_a_step_of_several_nodes_is_refused(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    done = hpc_train("+strategy=dp", *TINY, cwd=tmp_path, env=environment(**step))
    assert done.returncode == 2
    assert 'srun python -m hpc_train agent "$RUN"' in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_alone_goes_to_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``tests/doors`` shows that the agent trains a frozen run."""
    called: list[list[str]] = []
    monkeypatch.setattr("hpc_train.commands.agent.start_agent", lambda arguments, begun: called.append(arguments) or 7)
    RunDirectory(tmp_path).config.touch()
    assert cli.run([str(tmp_path)]) == 7
    assert called == [[str(tmp_path)]]


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["+strategy=dp", *TINY], TORCHRUN, "torchrun"),
        (["agent", "."], {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1"}, "--ntasks-per-node=1"),
    ],
)
def test_the_first_says_why(tmp_path: Path, arguments: list[str], variables: dict[str, str], said: str) -> None:
    done = hpc_train(*arguments, cwd=tmp_path, env=environment(**variables))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

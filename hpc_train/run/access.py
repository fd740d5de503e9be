"""What each command may do with a run that another user owns, and the check where a command opens a run.

A run directory holds code, weights, process ids and job ids. Its owner can change them at any time, so a command that
executes or loads them gives that owner the rights of the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from hpc_train.run.directory import RunDirectory
from hpc_train.run.owner import check_owner, deciding_files


class Access(StrEnum):
    """The three classes of access to a run."""

    READS = "reads"  # allowed for every run; files are written to a directory of the caller
    ACTS = "acts"  # on processes and jobs of the caller that belong to the run
    EXECUTES = "executes"  # runs code of the run or loads its weights, so the caller must trust the owner


# each command that takes a run; docs/howto/shared-runs.md has the same table
ACCESS: Mapping[str, Access] = MappingProxyType(
    {
        "status": Access.READS,
        "top": Access.READS,
        "logs": Access.READS,
        "why": Access.READS,
        "compare": Access.READS,
        "compare --baseline": Access.READS,
        "plot": Access.READS,
        "report": Access.READS,
        "wait": Access.READS,
        "sync": Access.READS,
        "checkpoint list": Access.READS,
        "checkpoint verify": Access.READS,
        "cancel": Access.ACTS,
        "stacks": Access.ACTS,
        "train": Access.EXECUTES,
        "freeze": Access.EXECUTES,
        "agent": Access.EXECUTES,
        "resume": Access.EXECUTES,
        "retry": Access.EXECUTES,
        "evaluate": Access.EXECUTES,
        "generate": Access.EXECUTES,
        "checkpoint verify --submit": Access.EXECUTES,  # the job runs cluster.setup of the run
        "checkpoint export": Access.EXECUTES,
        "checkpoint promote": Access.EXECUTES,
        "checkpoint import": Access.EXECUTES,
    }
)


def open_run(run: RunDirectory, command: str, trust_owner: bool = False) -> bool:
    """Checks that ``command`` may use ``run``. Every command that takes a run calls this before it uses the run.

    Args:
        command: a key of ``ACCESS``.
        trust_owner: whether the caller has passed ``--trust-owner``.

    Returns:
        Whether the command executes files of other users, whom the caller trusts. Jobs then need ``--trust-owner``.

    Raises:
        UserError: the command executes the run, which has files of a user whom the caller does not trust.
    """
    if ACCESS[command] is not Access.EXECUTES:
        return False
    return check_owner(deciding_files(run), run.path, trust_owner)

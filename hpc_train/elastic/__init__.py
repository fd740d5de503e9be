"""The agent of a node: starts its workers, watches them, and decides with the other agents what follows a failure.

How to read it:

1. One node: ``agent`` does what the hub says; ``attempt`` runs the node's workers once. ``warm_parent`` forks them,
   ``worker_process`` is the shell around each, ``workers`` sees to their pipes and ends, ``logs`` keeps their output;
   ``store`` is the small process in which the ranks meet; ``stop_requests`` has the signals, ``standard_streams`` the
   agent's own output.
2. All nodes: the ``hub``, in the agent of the batch host, talks to a ``link`` in every agent, over a ``channel`` each;
   ``rendezvous`` has the addresses, ``nodes`` what each node brings in, ``fabric`` the one environment for all of them.
3. What follows: the ``coordinator`` decides who takes part in the next attempt, by ``decision`` (the table of
   ``run/exits.py``, and when it is enough); ``attempts`` tells it in the run directory. ``requeue`` asks Slurm,
   ``budget`` has the ceiling of GPU-hours, ``orphans`` is what agents do without a hub.
4. What has failed: ``failures`` tells causes from their echoes, ``process_end`` the class of a silent death.
5. What hangs or is slow: ``watch`` looks at the heartbeats; ``hangs`` has the bounds, ``evidence`` asks the workers,
   ``culprit`` names the rank that the others wait for, ``stragglers`` the one that is only late.
"""

"""The agent of a node starts the node's workers, watches them, and decides with the other agents how to react to
failures.

Reading guide:

1. One node: ``agent`` follows the orders of the rendezvous server; ``attempts.run_attempt`` runs the node's workers
once.
   ``worker_process`` has the warm parent that forks the workers and the wrapper around each of them, ``workers``
   handles their pipes and exits, ``logs`` their output; ``store`` is the process with the ranks' key-value store.
2. All nodes: the rendezvous ``server``, in the agent of the batch host, talks to a ``client`` in every agent over one
   ``channel`` each; ``rendezvous`` has addresses and ports, ``nodes`` what each node contributes, ``fabric`` the
   network environment that all workers share.
3. Reactions: the ``coordinator`` decides who takes part in the next attempt, using ``decision`` (the table of
   ``run/exits.py``, the retry limit, the primary cause of a failure and the budget of GPU hours); ``attempts`` records
   it in the run directory; ``requeue`` asks Slurm to run the job again; ``client`` also handles the loss of the server.
4. Hangs and slow ranks: ``watch`` reads the heartbeats; ``hangs`` has the bounds and collects evidence from the
workers,
   ``culprit`` names the rank that the others wait for, ``stragglers`` a rank that is only late.
"""

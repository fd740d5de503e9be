"""The agents of a job start the workers of their nodes, watch them, and decide together how to react to failures.

1. One node: ``agent`` starts, and ``agent_loop`` follows the orders of the rendezvous server and runs the workers of an
   attempt. ``worker_process`` forks and wraps a worker, ``workers`` handles pipes, output and exits. With
   ``run.command``, a worker is a ``script`` that ``exec_script`` executes. With ``run.roles``, the script is the
   supervisor in ``roles``, which starts the agents of the roles.
2. All nodes, in ``rendezvous``: the ``server``, in the agent of the batch host, talks to a ``client`` in every agent
   over one ``channel`` each; ``messages`` are checked when they arrive; ``addresses`` defines ports and tokens.
   ``store`` is the process with the ranks' key-value store. ``nodes`` describes what each node contributes, ``fabric``
   the network environment that all workers share.
3. Reactions: ``rendezvous.coordinator`` decides who takes part in the next attempt, using ``decision`` (retry limit,
   primary cause, budget of GPU-hours); ``attempts`` records it; ``requeue`` asks Slurm to run the job again; ``client``
   also handles the loss of the server.
4. Hangs and slow ranks: ``watch`` reads the heartbeats and names stragglers; ``hang_bounds`` defines how long workers
   may be silent; ``hangs`` collects evidence from them, finds the rank that the others wait for, and defines what
   proves a hang.
"""

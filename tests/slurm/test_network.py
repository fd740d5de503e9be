"""Jobs on nodes with a network between them, and what becomes of them when a link is cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpc_train.run.exits import Exit
from hpc_train.run.files import read_json
from tests.doors.command import TINY
from tests.slurm.cluster import Cluster, link
from tests.slurm.runs import (
    SLOW,
    TWO_BY_TWO,
    detail,
    events,
    every_step,
    job_id,
    losses,
    wait_for_step,
)

GRADIENT_BYTES = 6 * 4 * 20_000  # of six steps; the small model has more numbers than that


@pytest.mark.beside
@pytest.mark.long_form(30)  # test_preflight.py measures the link
def test_the_gradients_of_two_nodes_cross_a_slow_link(
    network: Cluster, tmp_path: Path, local_losses: list[float]
) -> None:
    link(network, "n2", "100mbit")
    try:
        wanted = [*TINY, *TWO_BY_TWO, "cluster=slurm", "cluster.nodelist='n[1-2]'", "run.name=run", "-m"]
        done = network.hpc_train("+strategy=dp", *wanted, cwd=tmp_path, timeout=240)
        counters = network.call("srun", "--nodelist=n2", "tc", "-s", "qdisc", "show", "dev", "eth0").stdout
    finally:
        link(network, "n2", "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "outputs" / "run") == pytest.approx(local_losses, rel=1e-5)
    sent = re.search(r"tbf .* rate 100Mbit .*\n *Sent (\d+) bytes", counters)
    assert sent and int(sent[1]) > GRADIENT_BYTES, counters
    address = read_json(tmp_path / "outputs" / "run" / "attempts" / "000.json")["address"]
    assert re.fullmatch(r"[\d.]+", address), "the server listens on the one interface that leads to the other node"


@pytest.mark.beside
def test_a_cut_link_moves_a_job_to_other_nodes_or_ends_it(network: Cluster, tmp_path: Path) -> None:
    """Two jobs lose a node: the one that may be requeued goes on elsewhere, the other fails and says why."""
    outputs = tmp_path / "outputs"
    tied = ["cluster.nodelist='n[1-2]'", "+cluster.extra.no-requeue=true", "train.steps=1000"]
    ending = network.start(*SLOW, *TWO_BY_TWO, *tied, "run.name=ends", "-m", cwd=tmp_path)
    wait_for_step(outputs / "ends", 2)
    free = ["checkpoint.every=5", "train.steps=60"]
    moving = network.start(*SLOW, *TWO_BY_TWO, *free, "run.name=moves", "-m", cwd=tmp_path)
    wait_for_step(outputs / "moves", 6)
    job = job_id(outputs / "moves")
    cut = {nodes(network, job)[-1], "n2"}
    for node in cut:
        link(network, node, "cut")
    try:
        moved, _ = moving.communicate(timeout=250)
        ended, _ = ending.communicate(timeout=250)
    finally:
        for node in cut:
            link(network, node, "whole")
    assert moving.returncode == 0, moved
    assert set(every_step(outputs / "moves")) == set(range(1, 61))
    assert len(events(outputs / "moves", "resumed")) >= 1
    assert not cut & set(nodes(network, job))
    assert detail(network, job, "Restarts") == "1"
    assert "node n2 is lost" in ended
    assert not events(outputs / "ends", "requeued"), "by the agent that was cut off"
    assert ending.returncode == Exit.GAVE_UP, ended
    assert network.state(job_id(outputs / "ends")) in ("FAILED", "NODE_FAIL"), "by the agent's word, or by Slurm's"


def nodes(network: Cluster, job: str) -> list[str]:
    found = network.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%N").stdout.strip()
    return network.call("scontrol", "show", "hostnames", found).stdout.split()

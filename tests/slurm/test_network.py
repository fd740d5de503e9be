"""Jobs on nodes with a network between them: what becomes of them when a link is slow or cut, and what the preflight,
``doctor`` and ``bench collectives`` say of the nodes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_train.elastic.nodes import NodeFailures
from hpc_train.run.directory import RunDirectory
from hpc_train.run.exits import Exit
from hpc_train.run.files import read_json
from tests.checkpoint.progress import IN_LONG_FORM
from tests.doors.command import TINY
from tests.slurm.cluster import Cluster, link
from tests.slurm.runs import SLOW, TWO_BY_TWO, detail, events, every_step, job_id, losses, wait_for_step

GRADIENT_BYTES = 6 * 4 * 20_000  # of six steps; the small model has more numbers than that
CASE = [*TINY, "+strategy=dp", "cluster=slurm", "cluster.cpu_workers=1", "batch.global_size=12", "train.steps=1"]


@pytest.mark.long_form(30)  # tests/preflight
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


@pytest.mark.long_form(60)  # tests/faults/test_nodes.py loses nodes
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


def srun(uneven: Cluster, nodes: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    count = len(nodes.split(","))
    step = ["srun", f"--nodelist={nodes}", f"--nodes={count}", "--ntasks-per-node=1", sys.executable, *arguments]
    return uneven.call(*step, cwd=cwd, timeout=280)


@pytest.mark.long_form(45)  # tests/preflight
def test_nodes_that_differ_are_named_with_the_fix(uneven: Cluster, tmp_path: Path) -> None:
    """n1 has a slow GPU, n2 a slow link, n3 another config, another torch and a wrong clock; the job is warned, and
    trains."""
    asked = ["cluster.nodes=3", "cluster.preflight=full", "cluster.preflight_action=warn", "run.name=run"]
    run = RunDirectory(Path(uneven.hpc_train("freeze", *CASE, *asked, cwd=tmp_path).stdout.strip()))
    done = srun(uneven, "n1,n2,n3", "-m", "tests.slurm.preflight_entry", str(run.path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = events(run.path, "preflight")
    assert found["nodes"] == ["n1", "n2", "n3"] and len(found["pairs_gb_per_s"]) == 3
    errors = {one["message"]: one for one in found["findings"] if one["level"] == "error"}
    for words, kind, fix in (
        ("the config on n3", "config", "run.root"),
        ("torch is 1.0 on n3", "versions", "cluster.exclude=n3"),
        ("the clock of n3 is 5 s ahead", "clock", "chrony"),
        ("the network of n2", "network", "scontrol update nodename=n2 state=drain"),
        ("on n1 (GPU GPU-of-n1)", "slow_device", "scontrol update nodename=n1 state=drain"),
    ):
        assert [one["kind"] for message, one in errors.items() if words in message and fix in one["fix"]] == [kind], (
            errors
        )
    slow = next(event for event in events(run.path, "slow_node") if event["node"] == "n2")
    assert slow["rate"] < slow["usual"] and set(slow["partners"]) == {"n1", "n3"}
    (device,) = events(run.path, "slow_gpu")
    assert (device["node"], device["gpu"]) == ("n1", "GPU-of-n1") and "nodename=n1" in device["drain"]
    assert NodeFailures(run, 3600).failing_nodes() == {"n1", "n2"}, "the next requeue excludes them"
    assert "the network of n2" in "".join(path.read_text() for path in run.logs.glob("*.log"))


@IN_LONG_FORM  # beside other tests, a node may be measured at less than half of the others' speed
def test_a_job_that_is_to_stop_goes_on_without_the_slow_node(uneven: Cluster, tmp_path: Path) -> None:
    """The quick preflight looks for it, as all of them together are slower than any network should be."""
    asked = ["cluster.nodes=3", "cluster.preflight_action.network=exclude", "run.name=run"]
    done = uneven.hpc_train(*CASE, *asked, "-m", cwd=tmp_path)
    run = tmp_path / "outputs" / "run"
    assert done.returncode == 0, done.stdout + done.stderr
    assert [event["nodes"] for event in events(run, "preflight")] == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]
    assert [event["class"] for event in events(run, "worker_failed")] == ["unfit_node"]
    assert [event["exclude"] for event in events(run, "requeued")] == [["n2"]]
    assert detail(uneven, job_id(run), "Restarts") == "1"
    assert len(events(run, "finished")) >= 1


WRONG = """#!/bin/bash
# A Python on a node with something wrong: no /dev/shm on n2, a full disk on n3, another torch on n4.
export here={here} folder=$5  # of the reports: python -m hpc_train doctor --report-to FOLDER
case $SLURMD_NODENAME in
n2) wrong='mount --rbind /dev $here/dev; mount -t tmpfs tmpfs /dev
    ln -s $here/dev/{{null,zero,random,urandom,fd}} /dev/' ;;
n3) wrong='root=$(dirname $folder); mount -t tmpfs -o size=64k tmpfs $root; mkdir $folder
    cat /dev/zero > $root/file 2> /dev/null' ;;
n4) export PYTHONPATH=$here/other:$PYTHONPATH ;;
esac
if [ "$wrong" ]; then exec unshare --mount bash -c "$wrong; exec \\"\\$@\\"" - {python} "$@"; fi
exec {python} "$@"
"""


@pytest.mark.long_form(40)  # tests/bench/doctor
def test_the_doctor_names_each_node_and_what_is_wrong_there(uneven: Cluster, tmp_path: Path) -> None:
    wrapper, other = tmp_path / "python", tmp_path / "other" / "torch-1.0.dist-info"
    wrapper.write_text(WRONG.format(here=tmp_path, python=sys.executable))
    wrapper.chmod(0o755)
    (tmp_path / "dev").mkdir()
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    asked = [*CASE, "cluster.nodes=4", f"cluster.python={wrapper}", f"run.root={tmp_path / 'outputs'}"]
    done = uneven.hpc_train("doctor", "--submit", "--json", *asked, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    found, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("\n{") :].lstrip())
    assert set(found["nodes"]) == {"n1", "n2", "n4"}
    shm = [one for one in found["nodes"]["n2"]["findings"] if one["subject"] == "shared memory"]
    assert [(one["level"], "No such file" in one["text"], "--shm-size" in one["fix"]) for one in shm] == [
        ("error", True, True)
    ]
    errors = {one["subject"]: one for one in found["findings"] if one["level"] == "error"}
    assert "torch is not the same on all nodes: 1.0 on n4" in errors["versions"]["text"] and errors["versions"]["fix"]
    assert "n3 cannot write its report" in errors["nodes"]["text"] and errors["nodes"]["fix"]


@pytest.mark.long_form(20)  # tests/preflight/test_collectives.py
def test_the_doctor_measures_two_nodes_with_the_collectives_of_the_preflight(uneven: Cluster, tmp_path: Path) -> None:
    asked = ["doctor", "--submit", "--measure", "--json", "cluster.nodes=2", "cluster.cpu_workers=1"]
    done = uneven.hpc_train(*asked, "cluster.nodelist='n[1-2]'", f"run.root={tmp_path / 'outputs'}", cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1 and done.returncode in (0, 1), done.stdout + done.stderr
    result = json.loads(lines[0])
    assert result["nodes"] == ["n1", "n2"] and result["mode"] == "full" and result["bus_gb_per_s"]["world"] > 0
    assert result["clock_offset_s"].keys() == {"n2"} and len(result["gemm_tflops"]) == 2
    assert not list((tmp_path / "outputs").glob("hpc_train-bench-*"))


@pytest.mark.long_form(40)  # the test above
def test_the_doctor_as_a_task_on_each_node_reports_once(uneven: Cluster, tmp_path: Path) -> None:
    measured = srun(uneven, "n1,n2", "-m", "hpc_train", "doctor", "--measure", "cluster.cpu_workers=1", cwd=tmp_path)
    assert measured.stdout.count("preflight of n1, n2") == 1, measured.stdout + measured.stderr
    examined = srun(uneven, "n1,n2", "-m", "hpc_train", "doctor", cwd=tmp_path)
    assert examined.stdout.count("checks ok on 2 nodes") == 1, examined.stdout + examined.stderr


@pytest.mark.long_form(25)  # tests/preflight/test_collectives.py
def test_bench_collectives_over_two_nodes(uneven: Cluster, tmp_path: Path) -> None:
    command = ["-m", "hpc_train", "bench", "collectives", "cluster.cpu_workers=1", "--sizes", "64K", "--json"]
    done = srun(uneven, "n3,n4", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["nodes"] == 2 and {row["ranks"] for row in result["rates"]} == {2}
    assert all(row["wrong"] == 0 and row["bus_gb_per_s"] > 0 for row in result["rates"])
    assert not list((tmp_path / "outputs").iterdir())

"""What ``doctor`` prints and refuses, and whether nodes reach each other."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpc_train.bench.doctor import nodes
from hpc_train.bench.doctor.nodes import check_reach, peers, ports_of
from hpc_train.bench.doctor.report import environment_lines, finding_lines, verdict
from hpc_train.cli import run
from hpc_train.config.schema import Config, RunConfig
from hpc_train.errors import UserError
from hpc_train.machine.health.finding import ERROR, OK, WARNING, Finding
from hpc_train.machine.network.decision import FabricDecision, UnsetVariable, Variable
from tests.doors.schema import check_output
from tests.machine.network.machines import hgx

FOUND = [
    ("", Finding("job", OK, "can start")),
    ("n1", Finding("space", OK, "much")),
    ("n1", Finding("clock", WARNING, "late", "cluster.exclude=n1; for the staff: chrony")),
    ("n1", Finding("GPUs", OK, "8 x H100, 8 visible")),
    ("n2", Finding("GPUs", OK, "8 x H100, 8 visible")),
    ("n2", Finding("clock", WARNING, "late", "cluster.exclude=n2; for the staff: chrony")),
    ("n2", Finding("GPU health", ERROR, "GPU1: broken", "cluster.exclude=n2")),
]


def test_errors_come_first_and_nodes_with_the_same_finding_share_a_line() -> None:
    assert verdict([finding for _, finding in FOUND], 2) == "1 error, 2 warnings; 4 checks ok on 2 nodes"
    assert verdict([FOUND[0][1]], 1) == "no problem found; 1 check ok"
    assert list(finding_lines(FOUND, verbose=False)) == [
        "error   n2: GPU health: GPU1: broken",
        "        fix: cluster.exclude=n2",
        "warning n1,n2: clock: late",
        "        fix: cluster.exclude=n1,n2; for the staff: chrony",
        "ok      job: can start",
        "ok      n1,n2: GPUs: 8 x H100, 8 visible",
    ]
    assert "ok      n1: space: much" in list(finding_lines(FOUND, verbose=True))


def test_a_check_that_is_not_possible_is_not_silent() -> None:
    unknown = [(name, Finding("kernel log", OK, "not known: only root may read it")) for name in ("n1", "n2")]
    assert list(finding_lines(unknown, verbose=False)) == [
        "        n1,n2: kernel log: not known: only root may read it"
    ]
    assert verdict([finding for _, finding in unknown], 2) == "no problem found; 0 checks ok, 2 not possible on 2 nodes"


def test_variables_left_alone_are_listed_last_and_briefly() -> None:
    alone = tuple(UnsetVariable(name, "NCCL chooses") for name in ("NCCL_ALGO", "NCCL_PROTO"))
    decision = FabricDecision("infiniband", (Variable("NCCL_IB_HCA", "=mlx5_0", "one is for storage"),), alone, ())
    assert list(environment_lines(decision, verbose=False)) == [
        "workers export (network: infiniband):",
        "  NCCL_IB_HCA==mlx5_0  # one is for storage",
        "left alone: NCCL_ALGO, NCCL_PROTO (--verbose shows the reasons)",
    ]
    assert list(environment_lines(decision, verbose=True))[-1] == "  NCCL_PROTO  # NCCL chooses"


def test_no_line_of_a_recording_is_wrapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hgx(tmp_path)
    assert run(["doctor", "--sysfs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "between nodes: infiniband" in lines[0]
    (cards,) = [line for line in lines if line.startswith("  NCCL_IB_HCA=")]
    assert len(cards) > 120
    assert lines[-1].startswith("left alone: NCCL_ALGO, ") and sum("left alone" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (["--nodes", "0"], "--nodes 0 is not a number of nodes", "--nodes 2"),
        (["--topp", "x"], "unknown option --topp", "did you mean --topo?"),
        (["--quiet", "+strategy=dp"], "takes no overrides: +strategy=dp", "doctor --node --quiet"),
        (["--node", "--submit"], "--node checks this node, but --submit checks", "doctor --submit, or doctor --node"),
        (["--openmetrics", "x.prom"], "--openmetrics needs --quiet", "doctor --node --quiet --openmetrics"),
        (["--quiet", "--openmetrics", "/no/such/x.prom"], "No such file", "directory that exists"),
        (["--submit"], "no job can be submitted from here", "omit --submit"),
    ],
)
def test_mistakes_are_refused_with_a_fix(
    words: list[str], message: str, fix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and fix in said


QUIET = """
import sys
from hpc_train.cli import run
code = run(["doctor", "--node", "--quiet", "--gpus", "0", "--openmetrics", sys.argv[1]])
print(sorted({"torch", "wandb", "rich", "submitit", "psutil", "omegaconf.omegaconf"} & set(sys.modules)))
sys.exit(code)
"""


def test_the_quick_check_is_one_line_and_imports_little(tmp_path: Path) -> None:
    """A machine with GPUs may report other findings."""
    file = tmp_path / "node.prom"
    done = subprocess.run(
        [sys.executable, "-c", QUIET, str(file)], capture_output=True, text=True, check=False, timeout=120
    )
    line, imported = done.stdout.splitlines()
    assert line.startswith(("ok: ", "warning: ", "error: ")) and done.returncode == int(line.startswith("error")), line
    assert "torch" not in imported and "wandb" not in imported and "submitit" not in imported
    assert file.read_text().endswith("# EOF\n") and oct(file.stat().st_mode)[-3:] == "644"
    assert [path.name for path in tmp_path.iterdir()] == ["node.prom"]


def test_the_quick_check_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    code = run(["doctor", "--node", "--quiet", "--gpus", "4096", "--json"])
    printed = capsys.readouterr().out
    check_output(["doctor"], printed)
    found = json.loads(printed)
    (count,) = [finding for finding in found["findings"] if finding["subject"] == "GPU count"]
    assert code == 1 and not found["healthy"] and "Slurm configures 4096 GPUs" in count["text"] and count["fix"]


def test_a_step_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> list[str]:
        raise UserError("there is no such image", where="cluster.container.image", fix="another image")

    monkeypatch.setattr(nodes, "step_of_nodes", refused)
    with pytest.raises(UserError):
        nodes.examine_all(2, Config(run=RunConfig(root=str(tmp_path))), [])
    assert list(tmp_path.iterdir()) == []


def test_nodes_connect_to_the_first_and_the_next() -> None:
    names = ["n1", "n2", "n3"]
    assert [peers(names, name) for name in names] == [["n2"], ["n1", "n3"], ["n1"]]
    assert peers(["n1", "n2"], "n2") == ["n1"]
    assert list(check_reach(["n1"], "n1", "seed")) == list(check_reach(["n1", "n2"], "login", "seed")) == []
    assert all(15000 <= port < 30000 for port in ports_of("seed", "n1"))


def test_two_nodes_that_reach_each_other(tmp_path: Path) -> None:
    names, seed = ["localhost", "127.0.0.1"], str(tmp_path)
    found: dict[str, list[Finding]] = {}

    def check(name: str) -> None:
        found[name] = list(check_reach(names, name, seed))

    other = threading.Thread(target=check, args=(names[1],))
    other.start()
    check(names[0])
    other.join()
    assert [(one.level, one.text) for one in (found[names[0]] + found[names[1]])] == [
        (OK, "connections to 127.0.0.1 succeed on ports of 15000-29999"),
        (OK, "connections to localhost succeed on ports of 15000-29999"),
    ]


def test_a_node_that_does_not_respond_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (refused,) = check_reach(["localhost", "127.0.0.1"], "localhost", str(tmp_path), limit_s=0.3)
    assert refused.level == ERROR and "from localhost to 127.0.0.1" in refused.text
    assert "Connection refused" in refused.text and "open ports 15000-29999" in refused.fix

    def filtered(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(nodes.socket, "create_connection", filtered)
    assert (
        nodes._connect("n2", [15000, 15001], until=float("inf")) == "port 15001 does not respond, as behind a firewall"
    )

#!/usr/bin/env python3
"""A private Prometheus that scrapes your runs, and a Grafana with the dashboards where one is installed.

    monitoring.py up      start them; prints the keys that a run needs to be seen
    monitoring.py down    stop exactly what was started, and remove its data

Everything lies under one state directory (``--state``, default ``$TMPDIR/hpc_train-monitoring-$UID``). It must belong
to you, and nobody else may write there. Prometheus is Debian's or Ubuntu's package; `MONITORING_INSTALL=1` installs it.
Grafana is not in their registries: it is started if ``grafana-server`` is on the PATH. Standard library only: it runs
before any environment is made.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOKEN = Path("~/.config/hpc_train/prometheus.token").expanduser()  # that of runs without a token_file
INSTALL = ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]


class Refused(Exception):
    """The monitoring cannot be started here (exit code 2)."""


@dataclass(frozen=True)
class Monitoring:
    """Where it lives, and its ports on the loopback interface."""

    state: Path
    port: int
    grafana_port: int
    targets: Path
    scrape: str = "15s"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def config(self) -> str:
        """prometheus.yml with the paths of this state directory."""
        text = (HERE / "prometheus.yml").read_text()
        paths = {
            "/etc/prometheus/hpc_train/rules.yml": HERE / "rules.yml",
            "/var/lib/hpc_train/targets": self.targets,
            "/etc/prometheus/hpc_train/token": TOKEN,
        }
        for default, own in paths.items():
            text = text.replace(default, str(own))
        return text.replace(": 15s", f": {self.scrape}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, Callable[[Monitoring], None]] = {"up": up, "down": down}
    parser.add_argument("command", choices=commands)
    default = Path(tempfile.gettempdir()) / f"hpc_train-monitoring-{os.getuid()}"
    parser.add_argument("--state", type=Path, default=default, help="state directory (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus (default: %(default)s)")
    parser.add_argument("--grafana-port", type=int, default=3000, help="of Grafana (default: %(default)s)")
    parser.add_argument("--targets", type=Path, help="targets directory (default: targets in the state directory)")
    parser.add_argument("--scrape", default="15s", help="time between two scrapes (default: %(default)s)")
    options = parser.parse_args()
    absolute = options.state.absolute()
    state = absolute.parent.resolve() / absolute.name  # a link at its place stays one and is refused
    targets = options.targets.resolve() if options.targets else state / "targets"
    try:
        refuse_unsafe(state)
        commands[options.command](Monitoring(state, options.port, options.grafana_port, targets, options.scrape))
    except Refused as reason:
        print(f"monitoring: {reason}", file=sys.stderr)
        return 2
    return 0


def up(monitoring: Monitoring) -> None:
    install()
    make_state(monitoring.state)
    monitoring.targets.mkdir(parents=True, exist_ok=True)
    make_token()
    config = monitoring.state / "prometheus.yml"
    config.write_text(monitoring.config())
    address = f"127.0.0.1:{monitoring.port}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={monitoring.state}/data"]
    start(monitoring, "prometheus", [*command, f"--web.listen-address={address}"], f"{monitoring.url}/-/ready")
    print(f"Prometheus: {monitoring.url}")
    if grafana := shutil.which("grafana-server"):
        start_grafana(monitoring, grafana)
        print(f"Grafana: http://127.0.0.1:{monitoring.grafana_port}")
    else:
        print("Grafana: grafana-server is not on the PATH; the dashboards can be imported from", HERE / "grafana")
    keys = ["telemetry.prometheus.port=auto", f"telemetry.prometheus.targets_dir={monitoring.targets}"]
    print("runs are seen with:", shlex.join(keys))


def make_state(state: Path) -> None:
    """Makes the directory, unless this user has one.

    Raises:
        Refused: another user may have written files there.
    """
    state.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        state.mkdir(mode=0o700)
    refuse_unsafe(state)


def refuse_unsafe(state: Path) -> None:
    """Raises Refused if another user may have written files in the directory."""
    try:
        status = state.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        wrong = "is a symbolic link"
    elif not stat.S_ISDIR(status.st_mode):
        wrong = "is not a directory"
    elif status.st_uid != os.getuid():
        wrong = f"belongs to the user with id {status.st_uid}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        wrong = "can be written by other users"
    else:
        return
    raise Refused(f"{state} is not safe to use, because it {wrong}; remove it, or name another one with --state")


def install() -> None:
    if shutil.which("prometheus"):
        return
    if os.environ.get("MONITORING_INSTALL") != "1":
        raise Refused(f"prometheus is missing; install it with: {shlex.join(INSTALL)}   (or MONITORING_INSTALL=1)")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for call in (["apt-get", "update", "-qq"], [*INSTALL, "-qq"]):
        subprocess.run(call, check=True, stdout=sys.stderr, env=environment)


def make_token() -> None:
    """Creates the token that Prometheus sends, unless a run has created it."""
    if not TOKEN.exists():
        TOKEN.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(32))


def start_grafana(monitoring: Monitoring, program: str) -> None:
    home = os.environ.get("GRAFANA_HOME", "/usr/share/grafana")
    settings = {
        "PROMETHEUS_URL": monitoring.url,
        "HPC_TRAIN_DASHBOARDS": HERE / "grafana" / "dashboards",
        "GF_PATHS_PROVISIONING": HERE / "grafana" / "provisioning",
        "GF_PATHS_DATA": monitoring.state / "grafana",
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": monitoring.grafana_port,
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
    }
    os.environ.update({name: str(value) for name, value in settings.items()})
    ready = f"http://127.0.0.1:{monitoring.grafana_port}/api/health"
    start(monitoring, "grafana", [program, f"--homepath={home}"], ready)


def start(monitoring: Monitoring, name: str, command: list[str], ready: str) -> None:
    """Starts a program in the background, unless it runs, and waits until it answers."""
    if pid_of(monitoring, name) is not None:
        return
    log = monitoring.state / f"{name}.log"
    with log.open("a") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    (monitoring.state / f"{name}.pid").write_text(str(process.pid))
    deadline = time.monotonic() + 60
    while not answers(ready):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text().splitlines()[-3:])
            raise Refused(f"{name} did not start:\n{tail}")
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def pid_of(monitoring: Monitoring, name: str) -> int | None:
    """The id of the process that was started, if it runs and the id was not given to somebody else."""
    try:
        pid = int((monitoring.state / f"{name}.pid").read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if name.encode() in words else None


def down(monitoring: Monitoring) -> None:
    for name in ("grafana", "prometheus"):
        pid = pid_of(monitoring, name)
        if pid is None:
            continue
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        while pid_of(monitoring, name) is not None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
    if (monitoring.state / "prometheus.yml").exists():
        shutil.rmtree(monitoring.state)


if __name__ == "__main__":
    sys.exit(main())

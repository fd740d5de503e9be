"""A stand-in for an MLflow server on this machine: as much of its REST interface as a run asks for."""

from __future__ import annotations

import json
import re
import uuid
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.report.serving import LocalServer, QuietHandler, serving


class Service(LocalServer):
    """Holds experiments and runs in memory; metrics are appended, as the real server does."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.params: dict[str, dict[str, str]] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.metrics: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.models: set[str] = set()
        self.versions: list[dict[str, Any]] = []
        self.aliases: dict[str, str] = {}

    def answer(self, call: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """What the server returns for a call such as ``runs/create``; None for 404."""
        own = getattr(self, re.sub(r"\W", "_", call), None)
        return None if own is None else own(given)

    def experiments_get_by_name(self, given: dict[str, Any]) -> dict[str, Any] | None:
        found = self.experiments.get(given["experiment_name"])
        return None if found is None else {"experiment": {"experiment_id": found, "name": given["experiment_name"]}}

    def experiments_create(self, given: dict[str, Any]) -> dict[str, Any]:
        self.experiments[given["name"]] = str(len(self.experiments) + 1)
        return {"experiment_id": self.experiments[given["name"]]}

    def runs_create(self, given: dict[str, Any]) -> dict[str, Any]:
        name = uuid.uuid4().hex  # the client keeps the address of a run's artifacts for the life of the process
        own = {"run_id": name, "run_uuid": name, "experiment_id": given["experiment_id"], "status": "RUNNING"}
        self.runs[name] = own | {"run_name": given.get("run_name", ""), "lifecycle_stage": "active"}
        self.runs[name]["artifact_uri"] = f"mlflow-artifacts:/{given['experiment_id']}/{name}/artifacts"
        self.params[name] = {}
        self.tags[name] = {tag["key"]: tag["value"] for tag in given.get("tags", [])}
        return self.runs_get({"run_id": name})

    def runs_get(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["run_id"]
        tags, params = ([{"key": key, "value": value} for key, value in each[name].items()]
                        for each in (self.tags, self.params))  # fmt: skip
        return {"run": {"info": self.runs[name], "data": {"tags": tags, "params": params}}}

    def runs_search(self, given: dict[str, Any]) -> dict[str, Any]:
        wanted = re.fullmatch(r"tags\.`(.+)` = '(.+)'", given["filter"])
        assert wanted is not None
        found = [name for name, tags in self.tags.items() if tags.get(wanted[1]) == wanted[2]]
        return {"runs": [self.runs_get({"run_id": name})["run"] for name in found]}

    def runs_update(self, given: dict[str, Any]) -> dict[str, Any]:
        self.runs[given["run_id"]]["status"] = given["status"]
        return {"run_info": self.runs[given["run_id"]]}

    def runs_log_batch(self, given: dict[str, Any]) -> dict[str, Any]:
        for param in given.get("params", []):
            assert self.params[given["run_id"]].setdefault(param["key"], param["value"]) == param["value"]
        self.metrics += given.get("metrics", [])
        self.tags[given["run_id"]] |= {tag["key"]: tag["value"] for tag in given.get("tags", [])}
        return {}

    def registered_models_create(self, given: dict[str, Any]) -> dict[str, Any]:
        self.models.add(given["name"])
        return {"registered_model": {"name": given["name"]}}

    def registered_models_get(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"registered_model": {"name": given["name"]}}

    def model_versions_get(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"model_version": self.versions[int(given["version"]) - 1]}

    def model_versions_create(self, given: dict[str, Any]) -> dict[str, Any]:
        self.versions.append(given | {"version": str(len(self.versions) + 1), "status": "READY"})
        return {"model_version": self.versions[-1]}

    def model_versions_search(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"model_versions": [one for one in self.versions if given["filter"] == f"name='{one['name']}'"]}

    def model_versions_get_download_uri(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"artifact_uri": self.versions[int(given["version"]) - 1]["source"]}

    def registered_models_alias(self, given: dict[str, Any]) -> dict[str, Any] | None:
        if "version" in given:
            self.aliases[given["alias"]] = given["version"]
        if given["alias"] not in self.aliases:
            return None
        return {"model_version": self.versions[int(self.aliases[given["alias"]]) - 1]}

    def listed(self, folder: str) -> dict[str, Any]:
        """What a folder of artifacts holds."""
        below = [path.removeprefix(f"{folder}/").split("/") for path in self.files if path.startswith(f"{folder}/")]
        return {"files": [{"path": name, "is_dir": is_dir} for name, is_dir in {(p[0], len(p) > 1) for p in below}]}


class _Handler(QuietHandler):
    server: Service

    def do_GET(self) -> None:
        given = dict(parse_qsl(urlsplit(self.path).query))
        if self._artifact() is None:
            self._answer(given)
        elif self._artifact():
            self._send(self.server.files[str(self._artifact())])
        else:
            self._send(json.dumps(self.server.listed(given.get("path", ""))).encode())

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.server.files[str(self._artifact())] = data
        self._send(b"{}")

    def _artifact(self) -> str | None:
        """The path of the artifact that is asked for; empty for a list of them, None for other calls."""
        match = re.search(r"/mlflow-artifacts/artifacts(?:/(.+))?$", urlsplit(self.path).path)
        return None if match is None else match[1] or ""

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    do_PATCH = do_POST

    def _answer(self, given: dict[str, Any]) -> None:
        call = urlsplit(self.path).path.rpartition("/mlflow/")[2]
        found = self.server.answer(call, given)
        missing = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": f"no {call}"}
        self._send(json.dumps(missing if found is None else found).encode(), 404 if found is None else 200)


def service() -> AbstractContextManager[Service]:
    return serving(Service())

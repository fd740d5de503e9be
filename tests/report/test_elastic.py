"""The files of deploy/monitoring/elastic, with a stand-in for Elasticsearch that runs the pipeline and checks types."""

from __future__ import annotations

import json
import re
import runpy
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hpc_train.run.events import EVENTS
from tests.report.monitored import DEPLOY, eventful

ELASTIC = DEPLOY / "elastic"
Document = dict[str, Any]
AGGREGATES = {"avg": {"double", "long"}, "terms": {"keyword"}, "date_histogram": {"date"}}
ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "double": lambda value: type(value) in (int, float),
    "long": lambda value: type(value) is int,
    "keyword": lambda value: type(value) is str,
    "text": lambda value: type(value) is str,
    "boolean": lambda value: type(value) is bool,
    "date": lambda value: datetime.fromisoformat(value) is not None,
}


def properties() -> dict[str, dict[str, Any]]:
    """Returns the mapping of each field of the template by its path."""
    template = json.loads((ELASTIC / "template.json").read_text())
    found: dict[str, dict[str, Any]] = {}

    def collect(fields: Mapping[str, Any], prefix: str) -> None:
        for name, mapping in fields.items():
            found[prefix + name] = mapping
            collect(mapping.get("properties", {}), f"{prefix}{name}.")

    collect(template["template"]["mappings"]["properties"], "")
    return found


def test_the_files_are_those_of_the_tables() -> None:
    generated = runpy.run_path(str(ELASTIC / "generate.py"))["files"]()
    kept = {name: (ELASTIC / name).read_text() for name in generated}
    assert kept == generated, "python deploy/monitoring/elastic/generate.py"


def test_each_field_of_the_dashboard_is_in_the_template_with_its_type() -> None:
    fields = properties()
    objects = {one["id"]: one for one in map(json.loads, (ELASTIC / "kibana.ndjson").read_text().splitlines())}
    aggregated = []
    for one in objects.values():
        assert all(objects[reference["id"]]["type"] == reference["type"] for reference in one["references"])
        attributes = one["attributes"]
        for aggregation in json.loads(attributes.get("visState", "{}")).get("aggs", []):
            if aggregation["type"] != "count":
                name = aggregation["params"]["field"]
                assert fields[name]["type"] in AGGREGATES[aggregation["type"]], name
                aggregated.append(name)
        assert {*attributes.get("columns", [])} <= {*fields}
        query = json.loads(attributes.get("kibanaSavedObjectMeta", {}).get("searchSourceJSON", "{}")).get("query", {})
        for name, value in re.findall(r"(\w+): (\([^)]*\)|\w+)", query.get("query", "")):
            assert fields[name]["type"] == "keyword"
            if name == "kind":
                assert {*value.strip("()").split(" or ")} <= {*EVENTS}
    assert {"metrics.loss", "hpc_train.class", "kind", "run", "@timestamp"} <= {*aggregated}
    panels = json.loads(objects["hpc_train-runs"]["attributes"]["panelsJSON"])
    assert len(panels) == len(objects) - 2, "all but the data view and the dashboard itself"


class Elasticsearch(ThreadingHTTPServer):
    """Appends what is sent to ``_bulk?pipeline=hpc_train`` to ``documents``, after the pipeline that was sent to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pipeline: Document = {}
        self.documents: list[Document] = []

    def index(self, document: Document) -> int:
        """Returns the HTTP status of a document: 400 if a value does not have the type of its field."""
        try:
            for processor in self.pipeline["processors"]:
                ((kind, settings),) = processor.items()
                process(kind, settings, document)
        except (AssertionError, KeyError, ValueError) as error:
            document["error"] = {"message": repr(error)}
        self.documents.append(document)
        return 201 if all(fits(document, name, mapping) for name, mapping in properties().items()) else 400


class Handler(BaseHTTPRequestHandler):
    server: Elasticsearch

    def do_PUT(self) -> None:
        content = self.content()
        if self.path == "/_ingest/pipeline/hpc_train":
            self.server.pipeline = json.loads(content)
        self.answer({"acknowledged": True})

    def do_POST(self) -> None:
        assert self.path == "/_bulk?pipeline=hpc_train"
        lines = [json.loads(line) for line in self.content().splitlines()]
        items = [{"create": {"status": self.server.index(document)}} for document in lines[1::2]]
        self.answer({"errors": any(item["create"]["status"] != 201 for item in items), "items": items})

    def content(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Is silent."""


def value_of(document: Document, path: str) -> Any:
    value: Any = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def fits(document: Document, path: str, mapping: Mapping[str, Any]) -> bool:
    value = value_of(document, path)
    if value is None or "properties" in mapping or mapping.get("enabled") is False:
        return True
    return all(map(ACCEPTS[mapping["type"]], value if isinstance(value, list) else [value]))


def holds(condition: str | None, document: Document) -> bool:
    if condition is None:
        return True
    found = re.fullmatch(r"ctx\.([\w.?]+) ([!=]=) (?:'(\w+)'|null)", condition)
    assert found is not None, condition
    return (value_of(document, found[1].replace("?", "")) == found[3]) is (found[2] == "==")


def process(kind: str, settings: Mapping[str, Any], document: Document) -> None:
    """Applies a processor as the reference of Elasticsearch describes it."""
    if not holds(settings.get("if"), document):
        return
    value = value_of(document, settings["field"])
    if kind == "grok":
        matches = (re.search(pattern.replace("(?<", "(?P<"), value) for pattern in settings["patterns"])
        found = next((match for match in matches if match is not None), None)
        assert found is not None or settings.get("ignore_failure"), value
        document |= {} if found is None else found.groupdict()
    elif kind == "json":
        document[settings["target_field"]] = json.loads(value)
    elif kind in ("remove", "rename"):
        assert value is not None or settings.get("ignore_missing"), settings
        document.pop(settings["field"], None)
        if kind == "rename" and value is not None:
            document[settings["target_field"]] = value
    elif kind == "date" and settings["formats"] == ["UNIX"]:
        document["@timestamp"] = datetime.fromtimestamp(float(value), UTC).isoformat()
    elif kind == "date":
        document["@timestamp"] = f"{value}+00:00"
    elif kind == "convert":
        document[settings["field"]] = int(value)
    elif kind == "set":
        document[settings["field"]] = value_of(document, settings["copy_from"])
    else:
        assert kind == "date_index_name", kind
        stream = settings["index_name_prefix"].replace("{{{stream}}}", document["stream"])
        document["_index"] = stream + datetime.fromisoformat(value).strftime("%Y.%m")


@contextmanager
def elasticsearch() -> Iterator[tuple[Elasticsearch, str]]:
    server = Elasticsearch()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(method: str, url: str, content: bytes) -> Any:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def test_the_documents_of_a_run_have_the_types_of_the_template(tmp_path: Path) -> None:
    run = eventful(tmp_path / "small").run
    (run.path / "logs").mkdir(exist_ok=True)
    log = ["2026-11-29T12:00:00.500 [3] step 1/20  loss [5.57]", "the limit of this file is reached"]
    (run.path / "logs" / "n1-002.log").write_text("\n".join(log) + "\n")
    lines = []
    for path in [*run.path.glob("events/*.jsonl"), *run.path.glob("metrics/*.jsonl"), *run.path.glob("logs/*.log")]:
        for line in path.read_text().splitlines():
            sent = {"@timestamp": "2026-11-29T12:00:01+00:00", "message": line, "log": {"file": {"path": str(path)}}}
            lines += [json.dumps({"create": {}}), json.dumps(sent)]
    with elasticsearch() as (server, url):
        for name, place in (("template", "_index_template"), ("pipeline", "_ingest/pipeline")):
            send("PUT", f"{url}/{place}/hpc_train", (ELASTIC / f"{name}.json").read_bytes())
        answer = send("POST", f"{url}/_bulk?pipeline=hpc_train", "\n".join([*lines, ""]).encode())
        assert answer["errors"] is False
        send("POST", f"{url}/_bulk?pipeline=hpc_train", b'{"create": {}}\n{"log": {"file": {"path": "/tmp/x"}}}\n')
    *documents, wrong = server.documents
    assert "error" in wrong and not [each for each in documents if "error" in each]
    events = [each for each in documents if each["stream"] == "events"]
    written = [json.loads(line) for path in run.path.glob("events/*.jsonl") for line in path.read_text().splitlines()]
    assert Counter(each["kind"] for each in events) == Counter(event["event"] for event in written)
    assert {each["hpc_train"]["class"] for each in events if EVENTS[each["kind"]].is_failure}
    losses = [each for each in documents if value_of(each, "metrics.loss") is not None]
    assert losses and all(each["run"] == "small" and each["step"] == each["metrics"]["step"] for each in losses)
    assert all(each["_index"].startswith(f"hpc_train-{each['stream']}-20") for each in documents)
    first, second = (each for each in documents if each["stream"] == "logs")
    assert first["message"] == "step 1/20  loss [5.57]" and (first["node"], first["rank"], first["attempt"]) == (
        "n1",
        3,
        2,
    )
    assert first["@timestamp"] == "2026-11-29T12:00:00.500+00:00"
    assert second["message"] == log[1] and "rank" not in second

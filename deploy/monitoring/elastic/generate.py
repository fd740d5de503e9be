#!/usr/bin/env python3
"""Writes the files of this directory from the tables of events and metrics of hpc_train.

    python deploy/monitoring/elastic/generate.py

``template.json`` is an index template of Elasticsearch, ``pipeline.json`` an ingest pipeline, which parses the lines of
a run directory as Filebeat and Logstash send them, and ``kibana.ndjson`` has a data view, a search and a dashboard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpc_train.run.events import EVENTS, FIELDS, Level
from hpc_train.run.rows import METRICS

HERE = Path(__file__).resolve().parent
INDEX = "hpc_train-*"
LOG_LINE = r"^(?<time>\S+) \[(?<rank>\d+)\] (?<text>.*)$"
NOT_INDEXED: dict[str, Any] = {"type": "object", "enabled": False}  # lists, and fields whose type depends on the event
KEYWORD: dict[str, Any] = {"type": "keyword", "ignore_above": 8000}
HEAD: dict[str, dict[str, Any]] = {  # the fields of every document
    "@timestamp": {"type": "date"},
    "stream": {"type": "keyword"},  # events, metrics or logs
    "run": {"type": "keyword"},
    "kind": {"type": "keyword"},
    "node": {"type": "keyword"},
    "attempt": {"type": "long"},
    "rank": {"type": "long"},
    "step": {"type": "long"},
    "message": {"type": "text"},
}
LINES = {  # the titles of the curves of the dashboard, and their fields
    "Loss": "loss",
    "Validation loss": "val_loss",
    "Tokens per second": "tokens_per_s",
    "MFU": "mfu",
    "Share of communication": "comm_share",
    "Share of waiting for data": "data_wait_share",
    "Peak memory of a rank": "peak_memory_bytes",
}
OF_TYPE = {  # the mapping of each type in the table of events
    "text": KEYWORD,
    "text or null": KEYWORD,
    "list of texts": KEYWORD,
    "number": {"type": "double"},
    "seconds": {"type": "double"},
    "seconds > 0": {"type": "double"},
    "count": {"type": "long"},
    "count or null": {"type": "long"},
    "true or false": {"type": "boolean"},
}


def of_event(name: str) -> dict[str, Any]:
    types = {FIELDS[name], *(kind.types[name] for kind in EVENTS.values() if name in kind.types)}
    mappings = [OF_TYPE.get(each, NOT_INDEXED) for each in types]
    return mappings[0] if all(mapping == mappings[0] for mapping in mappings) else NOT_INDEXED


def of_metric(check: Callable[[Any], bool]) -> dict[str, Any]:
    if check(0.5):
        return {"type": "double"}
    return {"type": "long"} if check(1) else NOT_INDEXED


def template() -> dict[str, Any]:
    events = {name: of_event(name) for name in sorted(FIELDS)}
    metrics = {name: of_metric(check) for name, check in sorted(METRICS.items())}
    objects = {
        "hpc_train": {"dynamic": False, "properties": events},  # an event; fields that the table lacks are only stored
        "metrics": {"dynamic": True, "properties": metrics},  # a line of metrics, with your own
    }
    own = {"path_match": "metrics.*", "match_mapping_type": "long", "mapping": {"type": "double"}}
    mappings = {"dynamic_templates": [{"own_metrics": own}], "properties": {**HEAD, **objects}}
    return {"index_patterns": [INDEX], "template": {"mappings": mappings}}


def pipeline() -> dict[str, Any]:
    """Returns the pipeline, whose input is a line in ``message`` and the path of its file in ``log.file.path``."""
    folder = r"/(?<run>[^/]+)/(?<stream>events|metrics)/[^/]+\.jsonl$"
    log = r"/(?<run>[^/]+)/(?<stream>logs)/(?<node>[^/]+)-(?<attempt>\d+)\.log$"
    processors: list[dict[str, Any]] = [
        {"grok": {"field": "log.file.path", "patterns": [folder, log]}},
        {"json": {"field": "message", "target_field": "hpc_train", "if": "ctx.stream == 'events'"}},
        {"json": {"field": "message", "target_field": "metrics", "if": "ctx.stream == 'metrics'"}},
        {"remove": {"field": "message", "if": "ctx.stream != 'logs'"}},
        {"grok": {"field": "message", "patterns": [LOG_LINE], "ignore_failure": True, "if": "ctx.stream == 'logs'"}},
        *({"convert": {"field": name, "type": "long", "if": f"ctx.{name} != null"}} for name in ("rank", "attempt")),
        {"rename": {"field": "text", "target_field": "message", "override": True, "ignore_missing": True}},
    ]
    for source in ("hpc_train.time", "metrics.time"):
        processors.append(
            {"date": {"field": source, "formats": ["UNIX"], "if": f"ctx.{source.replace('.', '?.')} != null"}}
        )
    log_time = "yyyy-MM-dd'T'HH:mm:ss.SSS"
    processors.append({"date": {"field": "time", "formats": [log_time], "timezone": "UTC", "if": "ctx.time != null"}})
    processors.append({"remove": {"field": "time", "ignore_missing": True}})
    for target, source in {"kind": "event", "node": "node", "rank": "rank", "message": "message"}.items():
        processors.append(copied(f"hpc_train.{source}", target))
    for name in ("attempt", "step"):
        processors += [copied(f"hpc_train.{name}", name), copied(f"metrics.{name}", name)]
    monthly = {"date_rounding": "M", "index_name_format": "yyyy.MM"}
    prefix = "hpc_train-{{{stream}}}-"
    processors.append({"date_index_name": {"field": "@timestamp", "index_name_prefix": prefix, **monthly}})
    wrong = [{"set": {"field": "error.message", "value": "{{ _ingest.on_failure_message }}"}}]
    return {"description": "Lines of a run directory of hpc_train", "processors": processors, "on_failure": wrong}


def copied(source: str, target: str) -> dict[str, Any]:
    has_value = f"ctx.{source.replace('.', '?.')} != null"
    return {"set": {"field": target, "copy_from": source, "if": has_value}}


def kibana() -> list[dict[str, Any]]:
    """Returns the saved objects: a data view, a search for failures and reactions, and a dashboard."""
    failures = [name for name, kind in EVENTS.items() if kind.is_failure]
    shown = [name for name, kind in EVENTS.items() if kind.level >= Level.REACTION]
    curves = [
        visualization(title, "line", "stream: metrics", curve(f"metrics.{name}")) for title, name in LINES.items()
    ]
    panels = [
        *curves,
        visualization("Failures by class", "table", one_of(failures), counted("hpc_train.class", "run")),
        visualization("Events by kind", "table", "stream: events", counted("kind", "run")),
    ]
    search = {
        "title": "hpc_train: failures and reactions",
        "columns": ["run", "kind", "node", "rank", "message"],
        "sort": [["@timestamp", "desc"]],
        "kibanaSavedObjectMeta": source_of(one_of(shown)),
    }
    view = {"title": INDEX, "name": "hpc_train", "timeFieldName": "@timestamp"}
    objects = [
        {"id": "hpc_train", "type": "index-pattern", "attributes": view, "references": []},
        {"id": "hpc_train-reactions", "type": "search", "attributes": search, "references": [DATA_VIEW]},
        *panels,
    ]
    return [*objects, dashboard(objects[1:])]


DATA_VIEW = {"name": "kibanaSavedObjectMeta.searchSourceJSON.index", "type": "index-pattern", "id": "hpc_train"}


def one_of(kinds: Iterable[str]) -> str:
    return f"stream: events and kind: ({' or '.join(kinds)})"


def source_of(query: str) -> dict[str, str]:
    source = {"query": {"query": query, "language": "kuery"}, "filter": [], "indexRefName": DATA_VIEW["name"]}
    return {"searchSourceJSON": json.dumps(source)}


def visualization(title: str, kind: str, query: str, aggregations: list[dict[str, Any]]) -> dict[str, Any]:
    state = {"title": title, "type": kind, "aggs": aggregations, "params": PARAMETERS[kind]}
    attributes = {
        "title": title,
        "visState": json.dumps(state),
        "uiStateJSON": "{}",
        "kibanaSavedObjectMeta": source_of(query),
    }
    name = title.lower().replace(" ", "-")
    return {"id": f"hpc_train-{name}", "type": "visualization", "attributes": attributes, "references": [DATA_VIEW]}


AXIS = {"show": True, "labels": {"show": True, "truncate": 100}, "title": {}}
PARAMETERS: dict[str, dict[str, Any]] = {
    "table": {"perPage": 20, "showPartialRows": False, "showMetricsAtAllLevels": False, "showTotal": False},
    "line": {
        "type": "line",
        "categoryAxes": [{"id": "x", "type": "category", "position": "bottom", "scale": {"type": "linear"}, **AXIS}],
        "valueAxes": [
            {"id": "y", "name": "y", "type": "value", "position": "left", "scale": {"type": "linear"}, **AXIS}
        ],
        "seriesParams": [
            {"show": True, "type": "line", "mode": "normal", "valueAxis": "y", "data": {"id": "1"}, "lineWidth": 2}
        ],
        "addTooltip": True,
        "addLegend": True,
        "legendPosition": "right",
    },
}


def curve(name: str) -> list[dict[str, Any]]:
    """Returns the aggregations of the mean of a field over time, by run."""
    time = {"field": "@timestamp", "interval": "auto", "min_doc_count": 1}
    return [
        {"id": "1", "enabled": True, "type": "avg", "schema": "metric", "params": {"field": name}},
        {"id": "2", "enabled": True, "type": "date_histogram", "schema": "segment", "params": time},
        {"id": "3", "enabled": True, "type": "terms", "schema": "group", "params": largest("run")},
    ]


def counted(*names: str) -> list[dict[str, Any]]:
    """Returns the aggregations of the number of documents by the values of fields."""
    fields = [
        {"id": str(number), "enabled": True, "type": "terms", "schema": "bucket", "params": largest(name)}
        for number, name in enumerate(names, 2)
    ]
    return [{"id": "1", "enabled": True, "type": "count", "schema": "metric", "params": {}}, *fields]


def largest(name: str) -> dict[str, Any]:
    return {"field": name, "size": 20, "order": "desc", "orderBy": "1"}


def dashboard(shown: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the dashboard, with two objects in a row. Kibana's grid is 48 wide."""
    panels = []
    references = []
    for number, each in enumerate(shown):
        place = {"x": number % 2 * 24, "y": number // 2 * 15, "w": 24, "h": 15, "i": str(number)}
        name = f"panel_{number}"
        panel = {"type": each["type"], "gridData": place, "panelIndex": str(number), "panelRefName": name}
        panels.append({**panel, "embeddableConfig": {}})
        references.append({"name": name, "type": each["type"], "id": each["id"]})
    attributes = {
        "title": "hpc_train: runs",
        "panelsJSON": json.dumps(panels),
        "optionsJSON": json.dumps({"useMargins": True}),
        "timeRestore": False,
        "kibanaSavedObjectMeta": {
            "searchSourceJSON": json.dumps({"query": {"query": "", "language": "kuery"}, "filter": []})
        },
    }
    return {"id": "hpc_train-runs", "type": "dashboard", "attributes": attributes, "references": references}


def files() -> dict[str, str]:
    """Returns the contents of the files by name."""
    return {
        "template.json": json.dumps(template(), indent=1) + "\n",
        "pipeline.json": json.dumps(pipeline(), indent=1) + "\n",
        "kibana.ndjson": "".join(json.dumps(each) + "\n" for each in kibana()),
    }


if __name__ == "__main__":
    for name, content in files().items():
        (HERE / name).write_text(content)

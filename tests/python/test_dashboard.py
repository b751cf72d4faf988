"""deploy/grafana_dashboard.json: it asks for metrics and labels that the code has."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
from typing import NamedTuple

import pytest

from tf_dynemb.callbacks import Metrics

PATH = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "grafana_dashboard.json"

pytestmark = pytest.mark.skipif(not PATH.exists(), reason="no sources: this tests a wheel")
prometheus_client = pytest.importorskip("prometheus_client")

NAME = re.compile(r"\btf_dynemb_\w+")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
# Prometheus adds these.
OF_PROMETHEUS = {"job", "instance"}


class Metric(NamedTuple):
    """What a name in an expression denotes."""

    is_counter: bool
    labels: frozenset[str]


def named(kind, name, labels):
    labels = frozenset(labels) | OF_PROMETHEUS
    return {
        f"{name}{suffix}": Metric(
            kind != "gauge", labels | ({"le"} if suffix == "_bucket" else set())
        )
        for suffix in SUFFIXES[kind]
    }


def of_collector(collector):
    """Returns the metrics of a collector that yields families."""
    found = {}
    for family in collector.collect():
        found |= named(family.type, family.name, family._labelnames)
    return found


def of_module(module):
    """Returns the metrics that are the variables of a module or the attributes of an object."""
    found = {}
    for metric in vars(module).values():
        if isinstance(metric, (prometheus_client.Counter, prometheus_client.Histogram)):
            found |= named(metric._type, metric._name, metric._labelnames)
        elif isinstance(metric, prometheus_client.Gauge):
            found |= named("gauge", metric._name, metric._labelnames)
    return found


@pytest.fixture(scope="module")
def metrics():
    server = pytest.importorskip("tf_dynemb.serve.metrics", exc_type=ImportError)
    callback = Metrics(port=0)
    return {
        **of_module(server),
        **of_collector(server.ModelsCollector({})),
        **of_module(callback),
        **of_collector(callback._training),
    }


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(PATH.read_text(encoding="utf-8"))


def targets(dashboard):
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def faults(expression, legend, metrics):
    """Returns what is wrong in an expression and its legend."""
    names = set(NAME.findall(expression))
    if unknown := names - metrics.keys():
        return [f"there is no {name}" for name in sorted(unknown)]
    found = []
    for name, matchers in re.findall(r"\b(tf_dynemb_\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        found += [f"{name} has no label {each}" for each in labels - metrics[name].labels]
    of_all = set().union(*(metrics[name].labels for name in names))
    groups = re.findall(r"\bby \(([^)]*)\)", expression)
    grouped = {label.strip() for group in groups for label in group.split(",")}
    found += [f"by: no label {label}" for label in grouped - of_all]
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    found += [f"legend: no label {each}" for each in shown - (grouped if groups else of_all)]
    rated = set(re.findall(r"\b(?:rate|increase)\((tf_dynemb_\w+)", expression))
    for name in names:
        if metrics[name].is_counter != (name in rated):
            found.append(f"{name} is a {'counter' if metrics[name].is_counter else 'gauge'}")
    return found


def test_expressions_name_metrics_and_labels_that_exist(dashboard, metrics):
    expressions = targets(dashboard)
    assert len(expressions) > 50
    found = {
        f"{title}: {expression}": wrong
        for title, expression, legend in expressions
        if (wrong := faults(expression, legend, metrics))
    }
    assert found == {}
    used = set().union(*(NAME.findall(expression) for _, expression, _ in expressions))
    assert any(name.startswith("tf_dynemb_training_") for name in used)
    assert any(not name.startswith("tf_dynemb_training_") for name in used)


@pytest.mark.parametrize(
    ("expression", "legend", "wrong"),
    [
        ("sum by (model) (rate(tf_dynemb_requests_total[1m]))", "{{model}}", []),
        ("rate(tf_dynemb_request_total[1m])", "", ["there is no tf_dynemb_request_total"]),
        ("tf_dynemb_requests_total", "", ["tf_dynemb_requests_total is a counter"]),
        ("rate(tf_dynemb_model_ready[1m])", "", ["tf_dynemb_model_ready is a gauge"]),
        ('tf_dynemb_model_ready{name="a"}', "", ["tf_dynemb_model_ready has no label name"]),
        ("sum by (table) (tf_dynemb_model_ready)", "", ["by: no label table"]),
        ("max by (model) (tf_dynemb_model_ready)", "{{version}}", ["legend: no label version"]),
        ("tf_dynemb_training_log", "{{job}} {{name}}", []),
        ("tf_dynemb_training_log", "{{table}}", ["legend: no label table"]),
    ],
)
def test_faults_are_found(expression, legend, wrong, metrics):
    assert faults(expression, legend, metrics) == wrong


def test_variables(dashboard, metrics):
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables.keys() == {"datasource", "model", "job"}
    assert variables["datasource"]["type"] == "datasource"
    for name in ("model", "job"):
        query = variables[name]["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()
        assert label in metrics[metric].labels
    text = json.dumps(dashboard)
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__all"}
    assert used == {"datasource", "model", "job", "__rate_interval"}
    sources = set(re.findall(r'"uid": "([^"]*)"', text))
    assert sources == {"${datasource}", dashboard["uid"]}


def test_panels_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = []
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        rows = range(place["y"], place["y"] + place["h"])
        assert columns[-1] < 24
        places += itertools.product(columns, rows)
        assert panel["title"]
        ids = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(ids)) == len(ids)
    assert len(set(places)) == len(places)

"""The Grafana dashboard: every metric and label in it is one that the service shows."""

import json
import re

from k8s.kustomizing import FOLDER
from onethread import one_torch_thread
from prometheus_client.parser import text_string_to_metric_families
from serving import serving

from aphoton_serve.local import LocalBackend

DASHBOARD = FOLDER / "grafana" / "aphoton.json"
NAME = re.compile(r"\baphoton_\w+")


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return found + [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]


async def test_every_metric_is_one_that_the_service_shows() -> None:
    backend = LocalBackend({"tiny": "random:tiny"}, device="cpu", dtype="float32", max_rows=2, max_model_len=64)
    with one_torch_thread():
        async with serving(backend) as served:
            await served.ai.completions.create(model="tiny", prompt="Once", max_tokens=4)
            text = (await served.web.get("/metrics")).text
    labels = {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(text) for sample in family.samples
    }
    assert {"aphoton_engine_up", "aphoton_time_to_first_token_seconds_bucket"} <= set(labels)
    for expression in expressions():
        (name,) = NAME.findall(expression)
        assert name in labels, expression
        # Behind Ray each sample has the number of its replica, too.
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert set(by.split(", ")) <= labels[name] | {"replica"}, expression
        assert set(re.findall(r"(\w+)=~", expression)) <= labels[name], expression
        assert ("rate(" in expression) == name.endswith(("_total", "_bucket")), expression


def test_it_is_a_dashboard() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 8
    variables = {one["name"] for one in dashboard["templating"]["list"]}
    for used in re.findall(r"\$\{?([a-z]\w*)", json.dumps(panels)):
        assert used in variables
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        # A legend that names a label must have it.
        for target in panel["targets"]:
            outer = re.search(r"by \(([^)]*)\)", target["expr"])
            assert outer is not None
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set(outer[1].split(", "))

"""What is installed is what Grafana and Prometheus take, and speaks of series that are exported and of no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvfabric.fabric.metrics import exported_series
from kvfabric.ops.cli import main

ROOT = Path(__file__).resolve().parents[2]
SERIES = {f"ray_{name}": {*labels} for name, _, labels in exported_series()}


class Strict(BaseModel):
    """Grafana's JSON model, as far as the dashboard uses it: a field it does not have is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Place(Strict):
    x: int = Field(ge=0, lt=24)
    y: int = Field(ge=0)
    w: int = Field(ge=1, le=24)
    h: int = Field(ge=1)


class Source(Strict):
    type: Literal["prometheus"]
    uid: str


class Target(Strict):
    ref_id: str = Field(alias="refId", pattern=r"^[A-Z]$")
    datasource: Source
    expr: str = Field(min_length=1)
    legend_format: str = Field(alias="legendFormat")


class Graph(Strict):
    id: int
    type: Literal["timeseries"]
    title: str = Field(min_length=1)
    description: str
    datasource: Source
    grid_pos: Place = Field(alias="gridPos")
    field_config: dict[str, Any] = Field(alias="fieldConfig")
    options: dict[str, Any]
    targets: list[Target] = Field(min_length=1)


class Row(Strict):
    id: int
    type: Literal["row"]
    title: str
    collapsed: bool
    grid_pos: Place = Field(alias="gridPos")
    panels: list[Any]


class Board(Strict):
    uid: str = Field(max_length=40)
    title: str
    tags: list[str]
    editable: bool
    schema_version: int = Field(alias="schemaVersion")
    refresh: str
    time: dict[str, str]
    templating: dict[str, list[dict[str, Any]]]
    panels: list[Graph | Row]


class Rule(BaseModel):
    """One rule of Prometheus: recorded or alerting."""

    model_config = ConfigDict(extra="forbid")

    record: str | None = None
    alert: str | None = None
    expr: str
    for_: str | None = Field(default=None, alias="for", pattern=r"^\d+[smh]$")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    with pytest.raises(SystemExit) as ended:
        main(["dashboards", "install", str(tmp_path / "to")])
    assert not ended.value.code
    return tmp_path / "to"


def unknown(expression: str) -> list[str]:
    """Series and labels in an expression that nothing exports, and recorded ones that are not of ours."""
    found = []
    for name, selector in re.findall(r"\b(ray_\w+)(\{[^}]*\})?", expression):
        if name not in SERIES:
            found.append(name)
            continue
        labels = set(re.findall(r"(\w+)\s*=~?", selector))
        found += [f"{name}: {label}" for label in labels - SERIES[name]]
    return found


def test_the_dashboard_is_of_grafanas_model_and_panels_do_not_overlap(installed: Path) -> None:
    data = json.loads((installed / "dashboards" / "kvfabric.json").read_text())
    board = Board.model_validate(data)
    taken: set[tuple[int, int]] = set()
    for panel in board.panels:
        place = panel.grid_pos
        cells = {(x, y) for x in range(place.x, place.x + place.w) for y in range(place.y, place.y + place.h)}
        assert not cells & taken, panel.title
        taken |= cells
    assert len({panel.id for panel in board.panels}) == len(board.panels)
    data["panels"][1]["bogus"] = 1
    with pytest.raises(ValidationError):
        Board.model_validate(data)


def unkept(sent: Any, kept: Any, at: str = "") -> list[str]:
    """Where a document holds what is not in ``kept``."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        lacking = [f"{at}.{name}" for name in sent if name not in kept]
        return lacking + [w for n in sent if n in kept for w in unkept(sent[n], kept[n], f"{at}.{n}")]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [w for n, (s, k) in enumerate(zip(sent, kept, strict=True)) for w in unkept(s, k, f"{at}.{n}")]
    return [] if sent == kept else [at]


def test_grafanas_own_types_know_every_field_and_value_of_the_dashboard(installed: Path) -> None:
    """grafana-foundation-sdk is generated from Grafana's schemas (its CUE kinds): what those do not know is not kept."""
    plugins.register_default_plugins()

    def read(data: dict[str, Any]) -> list[str]:
        return unkept(data, json.loads(JSONEncoder().encode(Dashboard.from_json(data))))

    data = json.loads((installed / "dashboards" / "kvfabric.json").read_text())
    assert read(data) == []
    panel = next(p for p in data["panels"] if p["type"] == "timeseries")
    panel["fieldConfig"]["defaults"]["units"] = "s"
    panel["options"]["legend"]["displayed"] = True
    panel["targets"][0]["expression"] = "up"
    assert {place.rpartition(".")[2] for place in read(data)} == {"units", "displayed", "expression"}


def expressions_of(installed: Path) -> list[str]:
    """Of the dashboard, the rules and the documentation."""
    data = json.loads((installed / "dashboards" / "kvfabric.json").read_text())
    expressions = [t["expr"] for panel in data["panels"] for t in panel.get("targets", ())]
    rules = yaml.safe_load((installed / "rules" / "kvfabric.yaml").read_text())
    expressions += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    shown = [block for page in pages for block in re.findall(r"```promql\n(.*?)```", page, re.DOTALL)]
    return expressions + [line for block in shown for line in block.splitlines() if line]


def test_every_expression_names_series_and_labels_that_are_exported(installed: Path) -> None:
    expressions = expressions_of(installed)
    assert len(expressions) > 35
    assert [wrong for expression in expressions for wrong in unknown(expression)] == []
    assert unknown('rate(ray_kvfabric_hits_total{stage="x"}[5m])') == ["ray_kvfabric_hits_total"]
    assert unknown('ray_kvfabric_live_leases{kind="x"}') == ["ray_kvfabric_live_leases: kind"]


def test_every_expression_is_promql(installed: Path) -> None:
    for expression in expressions_of(installed):
        promql_parser.parse(expression.replace("$__rate_interval", "5m"))
    for wrong, why in (("sum by (le (rate(x[5m]))", "parenthesis"), ("rate(x)", "expected type matrix")):
        with pytest.raises(ValueError, match=why):
            promql_parser.parse(wrong)


def test_the_families_that_tell_of_trouble_are_shown(installed: Path) -> None:
    text = (installed / "dashboards" / "kvfabric.json").read_text() + (
        installed / "rules" / "kvfabric.yaml"
    ).read_text()
    named = set(re.findall(r"ray_(kvfabric_\w+)", text))
    told = {name for name, _, _ in exported_series()}
    for needed in ("tokens", "cut_tokens", "unreused_tokens", "validation_failures", "recoveries", "audits"):
        assert f"kvfabric_{needed}_total" in named & told


def test_the_rules_are_of_prometheus_format_and_each_alert_bears_a_remedy(installed: Path) -> None:
    data = yaml.safe_load((installed / "rules" / "kvfabric.yaml").read_text())
    rules = [Rule.model_validate(rule) for group in data["groups"] for rule in group["rules"]]
    assert all((rule.record is None) != (rule.alert is None) for rule in rules)
    alerts = [rule for rule in rules if rule.alert]
    assert all(r.for_ and r.labels["severity"] and r.annotations["description"] for r in alerts)
    recorded = {rule.record for rule in rules if rule.record}
    assert {"kvfabric:effective_hit_rate:5m", "kvfabric:reused_hit_rate:5m"} == recorded
    assert "KvfabricAuditMismatch" in {rule.alert for rule in alerts}


def test_the_provisioning_leads_grafana_to_the_dashboard(installed: Path) -> None:
    provider = yaml.safe_load((installed / "provisioning" / "dashboards" / "kvfabric.yaml").read_text())
    assert provider["apiVersion"] == 1
    assert [p.name for p in Path(provider["providers"][0]["options"]["path"]).iterdir()] == ["kvfabric.json"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["dashboards", "install", str(tmp_path / "file")])
    assert ended.value.code == 2
    assert "cannot be written" in capsys.readouterr().err

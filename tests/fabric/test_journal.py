"""What a holder decided is kept in bounded memory and told in lines that bear no tokens."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from kvfabric.actors.log_lines import acquire_fields, line, lines_of
from kvfabric.fabric.journal import Answered, Happened, Journal, Released
from kvfabric.fabric.messages import Release
from kvfabric.fabric.metrics import FAMILIES, STAGES
from kvfabric.fabric.model import ModelSpec

from .one_holder import OneHolder

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelSpec.model_validate(
    {"groups": [{"name": "kv", "kind": "compressed_history", "block_tokens": 16, "block_bytes": 64}]}
)
PROMPT = range(700_000, 700_070)


def test_the_ring_is_bounded_in_entries_and_in_weight() -> None:
    journal = Journal(entries_max=4, weight_max=10)
    for lease in range(9):
        journal.add(Released(float(lease), lease, 0))
    assert [entry.at_s for entry in journal] == [5.0, 6.0, 7.0, 8.0]
    entries, passed_over = journal.since(3, 2)
    assert ([entry.at_s for entry in entries], passed_over) == ([7.0, 8.0], 4)
    heavy = Journal(weight_max=10)
    heavy.add(Happened(0.0, "stored", ()))
    one = OneHolder(MODEL)
    one.store(PROMPT)
    heavy.happened(1.0, "stored", [obj for obj in one.core.ctx.books.owner if obj is not None])
    assert len(heavy) == 0
    assert heavy.total == 2


def test_each_acquire_has_a_line_with_promise_allowance_grant_and_cause_and_no_token() -> None:
    one = OneHolder(MODEL)
    one.store(PROMPT)
    grant = one.granted(PROMPT)
    one.ask(Release(one.name(), grant.lease, 64))
    one.acquire(range(700_000, 700_010))
    one.core.ctx.draining = True
    one.acquire(PROMPT)
    entries = [entry for entry in one.core.ctx.journal if isinstance(entry, Answered)]
    told = [acquire_fields(entry) for entry in entries]
    assert [(t["asked_tokens"], t["hash_tokens"], t["usable_tokens"], t["granted_tokens"]) for t in told] == [
        (70, 64, 64, 64),
        (10, 0, 0, 0),
        (70, 64, 64, 0),
    ]
    assert told[0]["lease"] == grant.lease
    assert told[2]["cause"]["reason"] == "draining"
    whole = lines_of(list(one.core.ctx.journal), whole=True)
    short = lines_of(list(one.core.ctx.journal), whole=False)
    assert [event for event, _ in whole] == ["acquire", "release", "acquire", "acquire"]
    assert [fields["granted_tokens"] for _, fields in short] == [0, 0]
    for event, fields in whole:
        written = line(event, **fields)
        assert json.loads(written)["event"] == event
        assert not re.search(r"7000\d\d", written.replace(fields.get("request") or "", ""))


def test_neither_hit_nor_hit_rate_stands_alone_in_metrics_logs_or_commands() -> None:
    alone = re.compile(r"(?<![\w-])hits?(?:[ _]rates?)?(?![\w-])", re.IGNORECASE)
    assert alone.search("the hit rate")
    assert alone.search("hits")
    assert not alone.search("effective_hit_rate")
    assert not [family.name for family in FAMILIES if alone.search(family.name + " " + family.help)]
    assert not [stage for stage in STAGES if alone.search(stage)]
    found = []
    for folder in ("ops/operate", "ops/dashboards", "ops/doctor", "ops/config", "actors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
                if text and id(node) not in documented and alone.search(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")  # type: ignore[attr-defined]
    assert found == []

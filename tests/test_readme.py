"""The README and the pages of the documentation say what is so: what they name exists, and nothing is left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvfabric
from kvfabric.fabric.kinds import LAYER_OF, ObjectKind, Reason, Status
from kvfabric.fabric.metrics import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(name: str, title: str) -> str:
    """What stands below a heading, up to the next of its rank."""
    return re.split(r"(?m)^## ", page(name).split(f"\n## {title}\n")[1])[0]


def test_the_example_has_ten_lines() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", page("README.md"), re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def test_the_readme_is_short_and_begins_with_the_two_commands() -> None:
    assert len(page("README.md").split()) < 900
    assert re.findall(r"\$ (make \w+)", page("README.md"))[:2] == ["make demo", "make test"]


CLASSES = {
    "fabric": kvfabric.Fabric,
    "session": kvfabric.Session,
    "attempt": kvfabric.Attempt,
    "lease": kvfabric.Lease,
}


def names() -> list[tuple[str, str]]:
    return re.findall(
        r"\b(kvfabric|fabric|session|attempt|lease)\.([A-Za-z_]+)", page("docs/api.md").split("## Reference")[0]
    )


@pytest.mark.parametrize(("owner", "name"), sorted(set(names())))
def test_every_name_of_the_api_table_exists(owner: str, name: str) -> None:
    if owner == "kvfabric":
        assert name in kvfabric.__all__
    elif (owner, name) != ("lease", "views"):  # set when it is made
        assert hasattr(CLASSES[owner], name)


def test_the_api_table_leaves_no_verb_of_the_main_job_out() -> None:
    told = set(names())
    for verb in ("publish", "begin", "extend", "acquire", "probe", "explain"):
        assert ("session", verb) in told
    for name in ("launch", "connect", "connect_async", "weights_revision"):
        assert ("kvfabric", name) in told


def test_every_reason_stands_in_the_row_of_its_layer_and_no_other_word_does() -> None:
    rows = {}
    for layer, words in re.findall(
        r"^\| `(\w+)` \| (.*) \|$", section("docs/concepts.md", "Why a hit is short"), re.MULTILINE
    ):
        rows[layer] = set(re.findall(r"`(\w+)`", words))
    by_layer: dict[str, set[str]] = {}
    for reason, layer in LAYER_OF.items():
        by_layer.setdefault(str(layer), set()).add(str(reason))
    assert rows == by_layer


def test_the_five_kinds_and_all_statuses_are_named() -> None:
    kinds = re.findall(r"^\| `(\w+)` \|", section("docs/concepts.md", "The five kinds of state"), re.MULTILINE)
    assert set(kinds) == {str(kind) for kind in ObjectKind}
    assert all(f"`{status}`" in page("docs/concepts.md") for status in Status)


def test_the_commands_named_are_those_that_exist() -> None:
    named = set(re.findall(r"^\| `kvfabric (\w+)` \|", page("docs/commands.md"), re.MULTILINE))
    kvfabric_command = Path(sys.executable).with_name("kvfabric")
    for command in sorted(named):
        asked = subprocess.run([kvfabric_command, command, "--help"], capture_output=True, text=True, timeout=60)
        assert (asked.returncode, asked.stderr) == (0, "")
    everything = subprocess.run([kvfabric_command, "--help"], capture_output=True, text=True, timeout=60)
    assert set(re.findall(r"^[│|] (\w+)  ", everything.stdout, re.MULTILINE)) == named


def test_every_reason_has_one_row_that_says_where_to_look() -> None:
    rows = re.findall(
        r"^\| (`.*?) \| .+ \|$", section("docs/troubleshooting.md", "Every reason, and where to read on"), re.MULTILINE
    )
    assert sorted(word for row in rows for word in re.findall(r"`(\w+)`", row)) == sorted(map(str, Reason))


def test_every_metric_has_a_row_that_says_how_to_read_it() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+? \| .+ \|$", section("docs/metrics.md", "Each of them"), re.MULTILINE)
    assert rows == [family.name for family in FAMILIES]


def test_the_reference_has_everything_that_the_package_exports() -> None:
    assert sorted(re.findall(r"(?m)^::: kvfabric\.(\w+)$", page("docs/api.md"))) == sorted(kvfabric.__all__)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path) if path else document
        assert found.exists(), f"{document.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{document.name}: {target}"

"""Every command and snippet of the documentation runs, and prints what is shown."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvfabric.actors.spec import FabricSpec
from kvfabric.ops.cli import build

from .snippets import Block, agrees, blocks

ROOT = Path(__file__).resolve().parents[2]
# Those that start and end fabrics of their own come first.
FIRST = ["README.md", "docs/quickstart.md"]
PAGES = [
    *(ROOT / name for name in FIRST),
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "quickstart.md"),
]
BLOCKS = [block for page in PAGES for block in blocks(page, ROOT)]
NOT_RUN = {
    "installs packages": 1,
    "installs packages; CI runs both": 1,
    "installs packages; CI runs them": 1,
    "starts Ray; the tests have a cluster": 1,
}

QUICK_GROUP = {"name": "kv", "kind": "compressed_history", "block_tokens": 16}

CONTROLS = """
```python
raise ValueError("a snippet that is broken")
```

```python
print("this one", "is not")
```

<!-- prints -->
```text
this one is wrong
```

<!-- prints -->
```text
this ... not
```

```console
$ kvfabric status --no-such-option
```

<!-- exit: 2 -->
```console
$ kvfabric status --no-such-option
...no-such-option...
```

```console
$ kvfabric spec presets
a preset that there is not
```

```console
$ kvfabric spec presets
full_attention ...
$ echo from bash && false
```

```yaml
memory_byte: 1000000
```

```yaml
memory_bytes: 1000000
```

```promql
rate(ray_kvfabric_token_total[5m])
```

```promql
rate(ray_kvfabric_tokens_total{stages="asked"}[5m])
```

```promql
rate(ray_kvfabric_tokens_total{stage="asked"}[5m])
```

<!-- not run: a control -->
```python
raise ValueError("this is not tried")
```
"""
BROKEN = [0, 2, 4, 6, 7, 8, 10, 11]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By page, what became of each block; "controls.md" is the page above."""
    folder = tmp_path_factory.mktemp("snippets")
    controls, told = folder / "controls.md", folder / "results.json"
    controls.write_text(CONTROLS)
    command = [sys.executable, *map(str, (Path(__file__).with_name("run_snippets.py"), told, *PAGES, controls))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFABRIC")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for result in json.loads(told.read_text()):
        found.setdefault(result["page"], []).append(result)
    return found


@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_what_a_page_shows_is_so(page: str, results: dict[str, list[dict[str, Any]]]) -> None:
    told = results.get(page, [])
    assert [one["where"] for one in told] == [block.where for block in BLOCKS if block.page == page]
    problems = [f"{one['where']} ({one['language']}): {one['problem']}" for one in told if one["problem"]]
    assert not problems, "\n".join(problems)


def test_a_broken_snippet_is_found_and_the_whole_one_beside_it_passes(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    told = results["controls.md"]
    assert [number for number, one in enumerate(told) if one["problem"]] == BROKEN
    assert "a snippet that is broken" in told[0]["problem"]
    assert "ended with 2, not 0" in told[4]["problem"]


def test_what_does_not_run_says_why_and_is_counted() -> None:
    assert Counter(block.marks["not run"] for block in BLOCKS if "not run" in block.marks) == NOT_RUN


def test_a_block_without_a_language_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```text\nprose\n```\n")
    assert [block.language for block in blocks(page, tmp_path)] == ["text"]
    page.write_text("```\n$ kvfabric status\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:2: '' is none of python, "):
        list(blocks(page, tmp_path))


def test_a_comment_far_from_a_block_is_no_mark(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: far away -->\n\nA sentence.\n\n```python\n1\n```\n")
    assert next(blocks(page, tmp_path)).marks == {}


def test_commands_are_parted_from_their_output() -> None:
    block = Block("page.md", 1, "console", "$ one \\\n    --more\nout\nput\n$ two\n")
    assert block.commands() == [("one --more", "out\nput"), ("two", "")]
    with pytest.raises(ValueError, match="begins with"):
        Block("page.md", 1, "console", "output\n").commands()


def test_dots_stand_for_anything_and_nothing_else_does() -> None:
    assert agrees("a ... d", "a b\n  c d\n")
    assert not agrees("a ... d", "a b c\n")


def test_the_configuration_of_vllm_names_a_tier_and_fields_that_it_has() -> None:
    configured = [
        found for block in BLOCKS if block.language == "json" if "kv_connector" in (found := json.loads(block.body))
    ]
    told, connector = sorted(configured, key=lambda config: "kv_connector_module_path" in config)
    (tier,) = told["kv_connector_extra_config"]["secondary_tiers"]
    source = ROOT.joinpath(*tier.pop("module_path").split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    methods = [node for node in classes[tier.pop("type")].body if isinstance(node, ast.FunctionDef)]
    (init,) = (method for method in methods if method.name == "__init__")
    assert set(tier) <= {argument.arg for argument in init.args.kwonlyargs}
    assert "fabric" in tier
    FabricSpec.load({"model": {"groups": [QUICK_GROUP]}, **tier["launch"]})
    source = (
        ROOT.joinpath(*connector["kv_connector_module_path"].split(".")[1:])
        .with_suffix(".py")
        .read_text(encoding="utf-8")
    )
    assert f"class {connector['kv_connector']}(" in source
    extra = connector["kv_connector_extra_config"]
    assert all(f'"{field}"' in source for field in extra)
    FabricSpec.load({"model": {"groups": [QUICK_GROUP]}, **extra["launch"]})


def test_the_configuration_of_sglang_names_a_backend_and_fields_that_it_reads() -> None:
    (told,) = (
        found for block in BLOCKS if block.language == "json" if "class_name" in (found := json.loads(block.body))
    )
    source = ROOT.joinpath(*told["module_path"].split(".")[1:]).with_suffix(".py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    assert told["class_name"] in classes
    known = {
        node.target.id
        for node in classes["Options"].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert told.keys() - {"backend_name", "module_path", "class_name", "interface_v1"} <= known  # SGLang's own, ours
    FabricSpec.load({"model": {"groups": [QUICK_GROUP]}, **told["launch"]})


def inline() -> list[str]:
    """Commands that the prose names: `kvfabric ...`."""
    text = "\n".join(re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text(encoding="utf-8")) for page in PAGES)
    return sorted(set(re.findall(r"`(kvfabric [^`\n]+)`", text)))


@pytest.mark.parametrize("command", inline())
def test_a_command_that_prose_names_exists_with_its_options(command: str) -> None:
    words = shlex.split(command)[1:]
    found: Any = build(words[0])
    for word in words:
        options = {name for parameter in found.params for name in parameter.opts}
        if word.startswith("--"):
            assert word in options | {"--help", "--install-completion"}, f"{command}: {word}"
        elif hasattr(found, "commands"):  # a word in capitals stands for any of them
            found = found.commands[word] if word.islower() else next(iter(found.commands.values()))


def test_prose_names_commands_at_all() -> None:
    assert "kvfabric drain NODE --deadline-s 30" in inline()

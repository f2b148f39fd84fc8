"""The fenced blocks of the documentation, and what each is to be used for.

A block's language says how it is tried; a comment in the line above says what cannot be seen from it:

    python                            runs, in one namespace a page
    console                           lines behind ``$ `` run, one after the other; what stands below is their output
    yaml                              settings of a fabric: they are read as such
    promql                            names series and labels that are exported
    text                              prose: a formula, a drawing
    <!-- file: NAME -->               is written to a file of that name, for the blocks behind it
    <!-- prints -->                   (text) is what the python block before printed
    <!-- exit: N -->                  (console) the last command ends with this status
    <!-- not run: REASON -->          is not tried

In expected output ``...`` stands for anything, and runs of white space are alike.
"""

from __future__ import annotations

import doctest
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGES = ("python", "console", "yaml", "json", "promql", "text")
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r"<!-- (?P<name>file|prints|exit|not run)(?:: (?P<value>.*?))? -->$")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; ``line``: where its body begins."""

    page: str
    line: int
    language: str
    body: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[tuple[str, str]]:
        """Of a console block: each command with the output that is shown for it ("" for none)."""
        found: list[tuple[str, list[str]]] = []
        for line in self.body.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found and found[-1][0].endswith("\\"):
                found[-1] = (found[-1][0][:-1] + line.strip(), [])
            elif found:
                found[-1][1].append(line)
            elif line.strip():
                raise ValueError(f"{self.where}: a console block begins with `$ COMMAND`")
        return [(command, "\n".join(output)) for command, output in found]


def blocks(path: Path, root: Path) -> Iterator[Block]:
    """Every fenced block of a page, in order. Raises ValueError for one without a language that is known."""
    text = path.read_text(encoding="utf-8")
    page = str(path.relative_to(root))
    for fence in FENCE.finditer(text):
        line = text.count("\n", 0, fence.start()) + 2
        if fence["language"] not in LANGUAGES:
            raise ValueError(f"{page}:{line}: {fence['language']!r} is none of {', '.join(LANGUAGES)}")
        above = text[: fence.start()].rstrip().rpartition("\n")[2].strip()
        mark = MARK.search(above)
        marks = {mark["name"]: mark["value"] or ""} if mark else {}
        yield Block(page, line, fence["language"], textwrap.dedent(fence["body"]), marks)


def agrees(expected: str, got: str) -> bool:
    """Whether the output is the one that is shown."""
    return doctest.OutputChecker().check_output(expected.strip() + "\n", got.strip() + "\n", FLAGS)

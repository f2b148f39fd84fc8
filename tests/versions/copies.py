"""This package as another version: copies of it with other schema numbers, and with settings that this one lacks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from kvfabric.fabric import settings, wire

ROOT = Path(wire.__file__).resolve().parents[1]
NOVEL, VITAL = "novel", "vital"
"""Settings of the next version: one that may be passed over, one that may not."""


def _edit(path: Path, pattern: str, with_what: str) -> None:
    text, changed = re.subn(pattern, with_what, path.read_text(), flags=re.MULTILINE)
    assert changed == 1, path
    path.write_text(text)


def copied(folder: Path) -> Path:
    """A copy of the package in ``folder``, which is then a path to import it from."""
    package = folder / "kvfabric"
    for name in ("fabric", "policies", "transport", "actors"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "__init__.py", package / "__init__.py")
    return package


def speaking(package: Path, schema: int) -> None:
    """Let a copy speak another schema of wire records."""
    _edit(package / "fabric" / "wire.py", r"^SCHEMA = \d+$", f"SCHEMA = {schema}")


def with_later_settings(package: Path) -> None:
    """Let a copy be the next version of the settings."""
    later = settings.SCHEMA + 1
    _edit(package / "fabric" / "settings.py", r"^SCHEMA = \d+$", f"SCHEMA = {later}")
    spec = package / "actors" / "spec.py"
    fields = "".join(f"\n    {name}: int = added({later}, 0, must={name == VITAL})" for name in (NOVEL, VITAL))
    _edit(spec, r"^    metrics_every_s: .*$", rf"\g<0>{fields}")
    _edit(spec, r"^(from \.\.fabric\.settings import) ", r"\1 added, ")

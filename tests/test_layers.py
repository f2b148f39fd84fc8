"""Who may import whom, and that each rule about it can fail."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["fabric", "policies", "transport", "actors", "engines", "ops"]
NIXL = {"nixl", "nixl_cu12", "nixl_cu13"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the package in it, under its own name, and the contracts beside it."""
    package = tmp_path / "kvfabric"
    package.mkdir()
    for module in ROOT.glob("*.py"):
        shutil.copy(module, package)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, package / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(tree: Path) -> tuple[int, str]:
    lint = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return lint.returncode, lint.stdout + lint.stderr


def test_the_layers_hold(tree: Path) -> None:
    code, report = lint_imports(tree)
    assert code == 0, report
    assert "0 broken" in report


@pytest.mark.parametrize(
    ("folder", "statement"),
    [
        # upwards
        ("fabric", "from ..policies import __doc__"),
        ("fabric", "from ..transport import __doc__"),
        ("fabric", "from ..actors import __doc__"),
        ("policies", "from ..actors import __doc__"),
        ("transport", "from ..actors import __doc__"),
        ("actors", "from ..engines import __doc__"),
        ("actors", "from ..ops import __doc__"),
        # sideways
        ("policies", "from ..transport import __doc__"),
        ("transport", "from ..policies import __doc__"),
        ("engines", "from ..ops import __doc__"),
        ("ops", "from ..engines import __doc__"),
        # out of the pure folders
        *[
            (folder, f"import {library}")
            for folder in ("fabric", "policies")
            for library in ("ray", "torch", "nixl", "socket", "threading", "asyncio", "time", "random", "secrets")
        ],
        # one folder for NIXL, ray from actors up
        ("actors", "import nixl"),
        ("ops", "import nixl_cu12"),
        ("engines", "import nixl_cu13"),
        ("transport", "import ray"),
    ],
)
def test_an_import_across_a_line_is_reported(tree: Path, folder: str, statement: str) -> None:
    (tree / "kvfabric" / folder / "planted.py").write_text(statement + "\n")
    code, report = lint_imports(tree)
    target = statement.removeprefix("import ").removeprefix("from ..").removesuffix(" import __doc__")
    imported = f"kvfabric.{target}" if target in FOLDERS else target
    assert code == 1, report
    assert f"kvfabric.{folder}.planted -> {imported}" in report


def names_nixl(node: ast.AST) -> bool:
    """Whether this node imports NIXL under any of its names: by a statement, or by ``import_module`` of a literal.

    A CUDA-named module in a string counts wherever it stands: nothing but an import needs it.
    """
    match node:
        case ast.Import(names=aliases):
            names = [alias.name for alias in aliases]
        case ast.ImportFrom(module=str(module), level=0):
            names = [module]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"), args=arguments):
            names = [str(argument.value) for argument in arguments if isinstance(argument, ast.Constant)]
        case ast.Constant(value=str(text)) if text.startswith("nixl_cu"):
            names = [text]
        case _:
            return False
    return any(name.split(".")[0] in NIXL for name in names)


def imports_nixl(source: str) -> bool:
    return any(names_nixl(node) for node in ast.walk(ast.parse(source)))


def test_one_file_imports_nixl_and_it_is_in_transport() -> None:
    files = [
        file.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if imports_nixl(file.read_text())
    ]
    assert len(files) == 1, files
    assert files[0].startswith("transport/")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import nixl", True),
        ("from nixl_cu12._api import nixl_agent", True),
        ("importlib.import_module('nixl._api')", True),
        ("for name in ('nixl', 'nixl_cu12'): load(name)", True),
        ("from .nixl import NixlLink", False),
        ("transport = 'nixl'", False),
    ],
)
def test_imports_of_nixl_are_told_from_mentions(source: str, found: bool) -> None:
    assert imports_nixl(source) is found


def ruff(source: str, filename: str) -> str:
    checked = subprocess.run(
        [
            Path(sys.executable).with_name("ruff"),
            "check",
            "--select=TID,S301",
            "--output-format=concise",
            "--stdin-filename",
            filename,
            "-",
        ],
        cwd=ROOT,
        input=source,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode in {0, 1}, checked.stderr
    return checked.stdout


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("where", ["tests/test_x.py", "examples/x.py", "ops/x.py"])
def test_a_folder_is_never_imported_as_a_package_of_its_own(folder: str, where: str) -> None:
    assert "TID251" in ruff(f"import {folder}\n", where)
    assert "TID251" in ruff(f"from {folder}.x import y\n", where)
    assert "TID251" not in ruff(f"import kvfabric.{folder}\nfrom kvfabric.{folder}.x import y\n", where)
    assert "TID251" not in ruff(f"from ..{folder} import x\nfrom .{folder} import y\n", where)


@pytest.mark.parametrize("library", ["pickle", "cloudpickle", "marshal", "multiprocessing.shared_memory"])
def test_nothing_is_unpickled_and_no_segment_is_tracked_for_us(library: str) -> None:
    assert "TID251" in ruff(f"import {library}\n", "transport/x.py")
    assert "TID251" not in ruff("import msgpack\n", "transport/x.py")

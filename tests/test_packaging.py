"""The wheel, which Ray workers get, holds the package, all of it and nothing else; importing it stays cheap."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"fabric", "policies", "transport", "actors", "engines", "ops"}
HEAVY = ["ray", "torch", "nixl", "nixl_cu12", "nixl_cu13", "transformers"]
# What adapters may import at the top: their environments are made apart, and no extra of ours installs them.
ENGINES = {"vllm", "sglang", "lmcache", "pyarrow"}
"""What engines bring; pyarrow comes with Ray Serve LLM."""


def tracked_files() -> list[PurePosixPath]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [PurePosixPath(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def packaged(files: list[PurePosixPath]) -> set[str]:
    """The files that belong in the package: the root's own modules, and whatever the six folders hold but prose."""
    own = {
        f"kvfabric/{name}"
        for name in files
        if len(name.parts) == 1 and (name.suffix == ".py" or name.name == "py.typed")
    }
    inside = {f"kvfabric/{name}" for name in files if name.parts[0] in FOLDERS and name.suffix != ".md"}
    return own | inside


def build_wheel(checkout: Path, out: Path) -> Path:
    out.mkdir()
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files as they are in the working tree, in a folder whose name is no identifier."""
    copy = tmp_path_factory.mktemp("packaging") / "a-clone.of it"
    for name in tracked_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build_wheel(checkout, checkout.parent / "wheel")


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_in(unpacked: Path, code: str, *arguments: str) -> str:
    """Runs ``code`` in a fresh interpreter that finds the wheel's package before the installed one; its output."""
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=unpacked.parent,
        env=os.environ | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_the_wheel_holds_just_the_tracked_files_of_the_packages(wheel: Path) -> None:
    assert contents(wheel) == packaged(tracked_files())


def test_a_folder_that_the_package_list_does_not_name_stays_out_of_the_wheel(checkout: Path, tmp_path: Path) -> None:
    """The comparison above can fail: this is how a new subpackage that nobody listed is found."""
    grown = tmp_path / "grown"
    shutil.copytree(checkout, grown, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    (grown / "fabric" / "unlisted").mkdir()
    (grown / "fabric" / "unlisted" / "__init__.py").touch()
    (grown / "ops" / "listed.py").touch()
    added = contents(build_wheel(grown, tmp_path / "wheel")) - packaged(tracked_files())
    assert added == {"kvfabric/ops/listed.py"}


def test_the_wheel_carries_the_license_and_the_type_marker(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvfabric/py.typed" in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_the_requirements_are_those_that_the_project_names(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    required = {
        str(line).partition(";")[0].strip() for line in PathDistribution(info).requires or [] if "extra" not in line
    }
    assert required == set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    assert {line.partition(">")[0].partition("<")[0] for line in required} == {
        *(
            "ray[default]",
            "torch",
            "nixl",
            "msgpack",
            "pydantic",
            "numpy",
            "blake3",
            "xxhash",
            "lz4",
            "zstandard",
            "pyyaml",
            "typer",
            "rich",
        )
    }


def test_every_required_release_is_pinned_for_continuous_integration() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for group in project["optional-dependencies"].values() for line in group]
    wanted = {
        requirement.partition(">")[0].partition("<")[0].partition("[")[0].strip().lower().replace("_", "-")
        for requirement in [*project["dependencies"], *extras]
    }
    assert wanted <= pinned


def entry_points(unpacked: Path) -> list[EntryPoint]:
    (info,) = unpacked.glob("*.dist-info")
    return list(PathDistribution(info).entry_points)


def test_the_command_and_the_commands_of_engines_are_entry_points(unpacked: Path) -> None:
    found = {(point.group, point.name): point.value for point in entry_points(unpacked)}
    assert found[("console_scripts", "kvfabric")] == "kvfabric.ops.cli:main"
    assert found[("kvfabric.commands", "demo")] == "kvfabric.engines.commands:register"


def test_every_entry_point_leads_to_something_callable(unpacked: Path) -> None:
    values = [point.value for point in entry_points(unpacked)]
    code = (
        "import sys; from importlib.metadata import EntryPoint\n"
        "print(*[v for v in sys.argv[1:] if callable(EntryPoint('x', v, 'y').load())])"
    )
    assert run_in(unpacked, code, *values).split() == values


IMPORT_ALL = """
import importlib, json, pkgutil, sys, warnings
import kvfabric
warnings.filterwarnings("ignore", "Using extra keyword arguments on `Field`")  # ray.serve.config
imported, absent = [], []
for module in pkgutil.walk_packages(kvfabric.__path__, "kvfabric."):
    if module.name.endswith(".__main__"):
        continue
    try:
        found = importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        absent.append([module.name, error.name])
    else:
        imported.append([module.name, found.__file__])
print(json.dumps([imported, absent]))
"""


def test_every_module_imports_from_the_wheel_alone_and_without_a_warning(unpacked: Path) -> None:
    imported, absent = json.loads(run_in(unpacked, IMPORT_ALL))
    assert {name.split(".")[1] for name, _ in imported} >= FOLDERS
    assert [file for _, file in imported if not Path(file).is_relative_to(unpacked)] == []
    assert [(name, library) for name, library in absent if library.split(".")[0] not in ENGINES] == []


LOADED = """
import importlib, json, pkgutil, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name.removesuffix(".*"))
    if name.endswith(".*"):
        for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            importlib.import_module(found.name)
print(json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""


@pytest.mark.parametrize("module", ["kvfabric", "kvfabric.fabric.*", "kvfabric.policies.*", "kvfabric.ops.cli"])
def test_importing_it_loads_none_of_the_heavy_libraries(unpacked: Path, module: str) -> None:
    assert json.loads(run_in(unpacked, LOADED, json.dumps(HEAVY), module)) == []


def test_a_heavy_library_that_is_loaded_would_be_seen(unpacked: Path) -> None:
    assert json.loads(run_in(unpacked, LOADED, json.dumps(HEAVY), "kvfabric", "ray")) == ["ray"]


def test_the_package_is_loaded_once_and_under_its_own_name() -> None:
    """The repository root is a package: pytest and a careless path would import its modules a second time."""
    import kvfabric.fabric

    assert Path(kvfabric.fabric.__file__).is_relative_to(ROOT)
    folders = [ROOT / folder for folder in FOLDERS]
    strangers = [
        name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None))
        and (Path(file) == ROOT / "__init__.py" or any(Path(file).is_relative_to(folder) for folder in folders))
        and name.split(".")[0] != "kvfabric"
    ]
    assert strangers == []

"""What every test process needs before Ray or NIXL is imported, and the Hypothesis profiles.

Ray workers, node processes and child interpreters inherit these variables.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings


def _set_environment(ray_folder: str) -> None:
    # The verbs library that NIXL bundles crashes at interpreter exit; without RDMA devices UCX can do without it.
    infiniband = Path("/sys/class/infiniband")
    if not infiniband.is_dir() or not any(infiniband.iterdir()):
        os.environ["UCX_MODULES"] = "^ib"
    os.environ["NIXL_LOG_LEVEL"] = "ERROR"
    # A short path of its own: Ray puts Unix sockets, whose names are limited to 107 bytes, under it.
    os.environ["RAY_TMPDIR"] = ray_folder
    # `ray start` turns authentication on where it finds a token that another `ray.init` left in the home folder.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Ray would kill workers when the tests' host runs low on memory, and runs them at nice 15.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"
    os.environ["RAY_worker_niceness"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # A process tells its node's metrics agent this often.
    os.environ["RAY_metrics_report_interval_ms"] = "1000"


_RAY_FOLDER = tempfile.mkdtemp(prefix="kvf-", dir="/tmp")
Path(_RAY_FOLDER, "ray").mkdir()
_set_environment(_RAY_FOLDER)


def pytest_unconfigure() -> None:
    """Removes the folder in this process alone: a forked child runs exit handlers, but no hooks."""
    # Processes of a cluster that a failed test left behind may still write there.
    shutil.rmtree(_RAY_FOLDER, ignore_errors=True)


# A loaded machine is slow, not wrong: no deadline an example. CI draws the same examples each time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


TESTS = Path(__file__).parent
CORE = ("fabric", "oracle", "policies", "replay", "simulate")
"""Folders whose tests need neither Ray nor another process, nor look at a clock: they may run beside the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("core", "rest"), help="run the tests of the pure core, or all others")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out folders of the other part before they are imported."""
    return True if _of_the_other_part(collection_path, config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The same for files that were named one by one."""
    left_out = [item for item in items if _of_the_other_part(item.path, config)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _of_the_other_part(path: Path, config: pytest.Config) -> bool:
    part = config.getoption("--part")
    if part is None or path == TESTS or not path.is_relative_to(TESTS):
        return False
    return (path.relative_to(TESTS).parts[0] in CORE) is not (part == "core")

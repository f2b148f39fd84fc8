"""The transformers library is loaded when it is needed, and its absence is one clear line."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys

import pytest
from transformers.utils import logging as advice

from kvfabric.engines.transformers.errors import EngineError, MissingExtra
from kvfabric.engines.transformers.library import quiet, require
from kvfabric.engines.transformers.tiny_models import build
from kvfabric.fabric.kinds import FabricError


def test_without_transformers_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert require().__name__ == "transformers"
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra) as refused:
        build("gemma3")
    assert str(refused.value) == (
        "the transformers engine needs transformers, which is not installed: pip install 'kvfabric[engines]'"
    )
    assert isinstance(refused.value, EngineError | FabricError)


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, kvfabric.engines.transformers\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
        "import kvfabric.engines.transformers.faults, kvfabric.engines.transformers.passport\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules\n"
    )
    child = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stderr, child.stdout) == (0, "", "")


def test_holding_advice_back_leaves_the_users_verbosity() -> None:
    before = advice.get_verbosity()
    advice.set_verbosity_info()
    try:
        with contextlib.suppress(RuntimeError), quiet():
            assert advice.get_verbosity() == logging.ERROR
            raise RuntimeError
        assert advice.get_verbosity() == logging.INFO
    finally:
        advice.set_verbosity(before)

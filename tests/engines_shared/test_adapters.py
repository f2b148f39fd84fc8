"""Which weights an adapter has is told by its files."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from kvfabric.engines.shared.adapters import AdapterRevisions, adapter_revision
from kvfabric.engines.transformers.weights import WeightsError

from ..actors.stories import eventually


def write_adapter(folder: Path, weight: float, alpha: int = 8) -> None:
    """An adapter's files as peft saves them."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file({"layers.0.q_proj.lora_A.weight": torch.full((4, 8), weight)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": alpha}))


@pytest.fixture
def revisions():
    found = AdapterRevisions(lambda path: Path(path) if Path(path).is_dir() else None)
    yield found
    found.close()


def test_equal_files_are_one_revision_and_other_tensors_or_another_scale_are_others(tmp_path):
    for name, weight, alpha in [("a", 1.0, 8), ("copy", 1.0, 8), ("trained", 2.0, 8), ("scaled", 1.0, 16)]:
        write_adapter(tmp_path / name, weight, alpha)
    first = adapter_revision(tmp_path / "a")
    assert adapter_revision(tmp_path / "copy") == first
    assert len({first, adapter_revision(tmp_path / "trained"), adapter_revision(tmp_path / "scaled")}) == 3


def test_nobody_waits_for_a_digest_and_one_read_again_is_digested_again(tmp_path, revisions):
    write_adapter(tmp_path, 1.0)
    path = str(tmp_path)
    assert revisions.revision(path) is None
    first = eventually(lambda: revisions.revision(path), bool)
    write_adapter(tmp_path, 2.0)
    assert revisions.revision(path) == first, "an engine keeps what it has read"
    assert revisions.revision(path, reloaded=True) is None
    assert eventually(lambda: revisions.revision(path), bool) == adapter_revision(tmp_path) != first


def test_an_adapter_that_cannot_be_digested_is_told_once_and_found_when_it_is_there(tmp_path, revisions, caplog):
    caplog.set_level(logging.WARNING)
    path = str(tmp_path / "late")
    for _ in range(3):
        assert revisions.revision(path) is None
        eventually(lambda: path in revisions._known, lambda waits: not waits)
    assert [path in line and "computed, not kept" in line for line in caplog.messages] == [True]
    write_adapter(tmp_path / "late", 1.0)
    assert eventually(lambda: revisions.revision(path), bool) == adapter_revision(tmp_path / "late")


def test_an_adapter_without_its_configuration_has_no_revision(tmp_path):
    write_adapter(tmp_path, 1.0)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(WeightsError, match=r"adapter_config\.json"):
        adapter_revision(tmp_path)

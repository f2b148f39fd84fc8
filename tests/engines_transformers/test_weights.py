"""A weights revision is a function of the tensors and of nothing else."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - a trap that must not go off
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvfabric.engines.transformers.tiny_models import FAMILIES, build, fine_tuned
from kvfabric.engines.transformers.weights import WeightsError, weights_revision

from .conftest import Story, quiet_environment, tell


class Small(torch.nn.Module):
    """Two parameters, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("derived", torch.rand(3), persistent=False)


def test_equal_tensors_give_an_equal_revision() -> None:
    assert weights_revision(Small()) == weights_revision(Small())
    assert weights_revision(Small()).startswith("b3-")
    assert len(weights_revision(Small())) == 3 + 32


def test_the_revision_of_known_tensors_is_pinned() -> None:
    assert weights_revision(Small()) == "b3-da3c218880ad151267e2c95ca2bbbcdb"


def test_any_change_of_a_tensor_changes_the_revision() -> None:
    revisions = [weights_revision(Small())]
    for change in ("bit", "dtype", "shape", "name", "order", "buffer"):
        model = Small()
        with torch.no_grad():
            if change == "bit":
                model.weight.view(torch.int32)[1, 2] ^= 1
            elif change == "dtype":
                model.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
            elif change == "shape":
                model.weight = torch.nn.Parameter(model.weight.reshape(3, 2))
            elif change == "name":
                model.gain = torch.nn.Parameter(model.bias)
                del model.bias
            elif change == "order":
                model.weight = torch.nn.Parameter(model.weight.flip(0))
            else:
                model.get_buffer("table").add_(1)
        revisions.append(weights_revision(model))
    assert len(set(revisions)) == len(revisions)


def test_strides_and_what_is_not_saved_do_not_matter() -> None:
    model = Small()
    model.weight = torch.nn.Parameter(model.weight.t().contiguous().t())
    assert not model.weight.is_contiguous()
    assert weights_revision(model) == weights_revision(Small())


def test_a_fine_tune_of_one_percent_is_another_revision(story: Story) -> None:
    tuned = fine_tuned(story.model)
    assert weights_revision(tuned) != weights_revision(story.model)
    assert weights_revision(fine_tuned(story.model)) == weights_revision(tuned)
    for (name, tensor), (_, other) in zip(story.model.named_parameters(), tuned.named_parameters(), strict=True):
        assert 0 < float((tensor - other).abs().max()) <= 0.0101 * float(tensor.abs().max()), name


def test_another_seed_is_another_model_and_the_same_seed_the_same(story: Story) -> None:
    assert weights_revision(build(story.family)[0]) == weights_revision(story.model)
    assert weights_revision(build(story.family, seed=1)[0]) != weights_revision(story.model)


def test_building_a_model_leaves_the_random_numbers_of_the_process_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    build("gpt_oss")
    assert torch.equal(torch.rand(2), expected)


def test_weights_are_the_same_in_every_process_and_nothing_is_printed(stories: dict[str, Story]) -> None:
    code = (
        "import json, sys\n"
        "from kvfabric.engines.transformers import generate, geometry, tiny_models, weights\n"
        "made = {family: tiny_models.build(family)[0] for family in tiny_models.FAMILIES}\n"
        "for model in made.values():\n"
        "    geometry.geometry_of(model)\n"
        "    generate.generate(model, tiny_models.prompt(1, 20), decode_tokens=2)\n"
        "json.dump({family: weights.weights_revision(model) for family, model in made.items()}, sys.stdout)\n"
    )
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=quiet_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert json.loads(child.stdout) == {f: weights_revision(tell(stories, f).model) for f in FAMILIES}


# Files.


def tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in Small().state_dict().items()}


def test_a_file_agrees_with_the_module_it_holds(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors", metadata={"format": "pt", "note": "does not matter"})
    assert weights_revision(tmp_path / "model.safetensors") == weights_revision(Small())
    assert weights_revision(str(tmp_path)) == weights_revision(Small())


@pytest.mark.parametrize("indexed", [True, False])
def test_sharding_does_not_matter(tmp_path: Path, indexed: bool) -> None:
    held = tensors()
    save_file({"weight": held["weight"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"table": held["table"], "bias": held["bias"]}, tmp_path / "model-00002-of-00002.safetensors")
    if indexed:
        where = dict.fromkeys(held, "model-00002-of-00002.safetensors") | {"weight": "model-00001-of-00002.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not of this checkpoint
    assert weights_revision(tmp_path) == weights_revision(Small())


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_agrees_with_the_one_in_memory(stories: dict[str, Story], tmp_path: Path, tied: bool) -> None:
    model = tell(stories, "gemma3").model
    if tied:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**{**model.config.to_dict(), "tie_word_embeddings": True}))
        assert "lm_head.weight" in model.state_dict()
    model.save_pretrained(tmp_path)
    assert weights_revision(tmp_path) == weights_revision(model)


def test_one_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "a.safetensors")
    save_file({"weight": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=r"b\.safetensors: tensor weight stands in another shard too"):
        weights_revision(tmp_path)


def test_a_pickled_checkpoint_is_never_opened(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (Path(tmp_path / "opened"),))  # type: ignore[return-value]

    for name in ("pytorch_model.bin", "model.pt"):
        (tmp_path / name).write_bytes(pickle.dumps(Trap()))
        with pytest.raises(WeightsError, match="only safetensors files are read"):
            weights_revision(tmp_path / name)
    with pytest.raises(WeightsError, match=r"there is no \*\.safetensors file"):
        weights_revision(tmp_path)
    assert not (tmp_path / "opened").exists()
    pickle.loads((tmp_path / "model.pt").read_bytes())
    assert (tmp_path / "opened").exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 16, b"\x08\x00\x00\x00\x00\x00\x00\x00notjson!"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors: cannot be read as safetensors") as refused:
        weights_revision(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', "{}"])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json: not an index of shards"):
        weights_revision(tmp_path)


def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    save_file(tensors(), tmp_path / "outside.safetensors")
    (inner / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "../outside.safetensors"}})
    )
    with pytest.raises(WeightsError, match="not a file beside it"):
        weights_revision(inner)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere: there is no such file or directory"):
        weights_revision(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="the module has no tensors"):
        weights_revision(torch.nn.Identity())
    with pytest.raises(WeightsError, match="weight is on the meta device"):
        weights_revision(torch.nn.Linear(2, 2, bias=False, device="meta"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"gone\.safetensors: cannot be read"):
        weights_revision(tmp_path)

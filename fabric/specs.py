"""Model specs as files: YAML in, YAML out, and what a spec amounts to in plain data.

The logic of ``kvfabric spec``: nothing here prints.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from .kinds import Form, ObjectKind, SpecError
from .model import GroupSpec, ModelSpec
from .presets import PRESETS, preset
from .sizes import bytes_at, bytes_per_token, fixed_bytes, window_bytes_per_token

SPEC_BYTES_MAX = 1 << 20


class UniqueKeyLoader(yaml.SafeLoader):
    """Plain YAML only, and a key that stands twice in one mapping is an error, not an overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node. Raises yaml.constructor.ConstructorError for a repeated key."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen and key_node.value != "<<":
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping",
                    node.start_mark,
                    f"{key_node.value!r} stands twice",
                    key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def known_model(name: str) -> ModelSpec:
    """The model of that name, a preset's or a YAML file's. Raises SpecError."""
    if name in PRESETS:
        return preset(name)
    if not Path(name).exists():
        raise SpecError(f"{name}: neither a file nor one of the presets {', '.join(PRESETS)}")
    return load_spec(name)


def load_spec(path: str | Path) -> ModelSpec:
    """The model spec in a YAML file: the fields of :class:`ModelSpec`, or those under ``model`` in a fabric's spec.

    Raises SpecError, one line with the file and the field or line: a file that cannot be read, YAML
    that is not plain data, an unknown or wrong field, a spec that could never hit.
    """
    return _model(read_mapping(path), str(path))


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises SpecError, one line with the file and, where there is one, the line."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(SPEC_BYTES_MAX + 1)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path}: not UTF-8 text") from None
    if len(text) > SPEC_BYTES_MAX:
        raise SpecError(f"{path}: longer than {SPEC_BYTES_MAX} characters")
    return _mapping(text, str(path))


def parse_spec(text: str, *, where: str) -> ModelSpec:
    """The model spec in YAML text; ``where`` names it in errors. Raises SpecError."""
    return _model(_mapping(text, where), where)


def _model(data: dict[str, Any], where: str) -> ModelSpec:
    if isinstance(data.get("model"), dict) and "groups" not in data:
        return ModelSpec.load(data["model"], where=f"{where}: model")
    return ModelSpec.load(data, where=f"{where}: ")


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        # A subclass of SafeLoader.
        data = yaml.load(text, UniqueKeyLoader)  # noqa: S506
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise SpecError(f"{where}{line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{where}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SpecError(f"{where}: nested too deep") from None
    except ValueError as error:  # a date or number that is none, such as 2026-13-01
        raise SpecError(f"{where}: {error}") from None
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise SpecError(f"{where}: {found} where a mapping with fields such as groups or model is expected")
    return data


def dump_spec(model: ModelSpec) -> str:
    """A model spec as YAML that :func:`load_spec` reads back to an equal spec."""
    data = model.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=None)


def summary(model: ModelSpec, *, tokens: int = 1 << 20) -> dict[str, Any]:
    """What a spec amounts to, as plain data: the grid, each group's cut and rule, bytes.

    Bytes are payload of all shards; ``bytes_at`` is for `tokens` tokens.
    """
    return {
        "name": model.name,
        "weights": model.weights,
        "shards": model.shards,
        "grid_tokens": model.grid_tokens,
        "drop_last_blocks": model.drop_last_blocks,
        "bytes_per_token": bytes_per_token(model),
        "window_bytes_per_token": window_bytes_per_token(model),
        "fixed_bytes": fixed_bytes(model),
        "bytes_at": {"tokens": tokens, "bytes": bytes_at(model, tokens)},
        "groups": [_group_summary(group) for group in model.groups],
    }


def _group_summary(group: GroupSpec) -> dict[str, Any]:
    return {
        "name": group.name,
        "kind": group.kind.value,
        "form": group.form.value,
        "of": group.of,
        "unit_tokens": group.unit_tokens,
        "endpoint_tokens": group.endpoint_unit_tokens,
        "layers": len(group.layers),
        "object_bytes": group.block_bytes,
        "page_bytes": group.page_bytes or group.block_bytes,
        "alignment_bytes": group.alignment_bytes,
        "needs": _rule_in_words(group),
    }


def _rule_in_words(group: GroupSpec) -> str:
    """What a resume at p needs of the group, as the scenario format words it."""
    if group.form is Form.STATE:
        return "the snapshot at p"
    overlap = f" - {group.overlap_tokens}" if group.overlap_tokens else ""
    words = {
        ObjectKind.COMPRESSED_HISTORY: "every block of the first c tokens",
        ObjectKind.INDEXER: f"every block of the first c tokens, in the revision of {group.of}",
        ObjectKind.UNCOMPRESSED_TAIL: f"tokens c{overlap} to p, in the revision of {group.of}",
        ObjectKind.SLIDING_WINDOW: f"the last {(group.window_tokens or 1) - 1} tokens before p",
    }[group.kind]
    if group.kind is ObjectKind.COMPRESSED_HISTORY:
        reached = f"p - {group.lag_tokens}" if group.lag_tokens else "p"
        words += f", c = {reached}" + (f" rounded down to {group.ratio}" if group.ratio > 1 else "")
    return words + (f", and the first {group.sink_tokens}" if group.sink_tokens else "")

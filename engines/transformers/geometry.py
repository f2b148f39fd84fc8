"""How a model's cache is cut into the fabric's objects, and where each tensor lies in their bytes.

The cache groups are read off a populated cache: its layer classes say which rules apply, its
tensors say shape and dtype. :func:`geometry_of` fills one with a few tokens; nothing is assumed
from a model's name.

An object holds all layers of its group. Per layer and tensor it has one run of rows (tokens or
compressed entries), row-major, at a fixed offset. A snapshot begins with its position (int64) and
has room for the most rows its tensors can have; rows beyond those of its position are zero.

What form a group takes follows from what an engine can still publish when it stands at p:

* History is append-only: blocks. With one compressed entry a block (``history_entries=1``) every p
  can be served, since the blocks that meet [0, c) end at c itself.
* A tail is a snapshot at exactly p. The engine holds the overlap half-projected (first series
  only, bias added) and the buffer raw, so that the bytes of one token differ with p: blocks keyed
  by token would not be a function of their key.
* A window holds the last W - 1 rows. Rows are functions of their absolute position: blocks, whose
  size must divide W - 1, or else its oldest block could never be filled. Or a snapshot.
* Recurrent state is a snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

from ...fabric.kinds import Form, ObjectKind, SpecError
from ...fabric.model import GroupSpec, ModelSpec
from ...fabric.needs import needs
from .errors import GeometryMismatch, UnsupportedCache
from .layer_classes import adapter_of, check_cache_class, class_name, is_static
from .layers import Part, Role, Rows, read
from .library import decoder_config, feed, fresh_cache, quiet
from .tensors import dtype_name, dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

POSITION = "position"
"""Name of the int64 at the head of every snapshot."""

_POSITION_BYTES = 8

_KINDS: dict[Role, tuple[ObjectKind, Role | None]] = {
    Role.KV: (ObjectKind.COMPRESSED_HISTORY, None),
    Role.INDEX: (ObjectKind.INDEXER, Role.KV),
    Role.RECURRENT: (ObjectKind.COMPRESSED_HISTORY, None),
    Role.CSA: (ObjectKind.COMPRESSED_HISTORY, None),
    Role.CSA_INDEX: (ObjectKind.INDEXER, Role.CSA),
    Role.CSA_TAIL: (ObjectKind.UNCOMPRESSED_TAIL, Role.CSA),
    Role.CSA_INDEX_TAIL: (ObjectKind.UNCOMPRESSED_TAIL, Role.CSA_INDEX),
    Role.HCA: (ObjectKind.COMPRESSED_HISTORY, None),
    Role.HCA_TAIL: (ObjectKind.UNCOMPRESSED_TAIL, Role.HCA),
    Role.WINDOW: (ObjectKind.SLIDING_WINDOW, None),
}
"""Kind of each role and the role it is ``of``, in the order the groups stand in a model."""

_VOLATILE_CONFIG = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Config fields that do not change what a token's state is (the dtype is in the layout)."""


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """How finely the groups are cut.

    ``block_tokens``: tokens a block of ordinary KV (and of an indexer with one key a token).
    ``history_entries``: compressed entries a block. ``window_form`` and ``window_block_tokens``:
    windows as blocks of so many tokens, or as snapshots. ``grid_tokens``: distance of snapshots.
    A resume position must be a multiple of all of them; 1 serves every position.
    """

    block_tokens: int = 1
    history_entries: int = 1
    window_form: Form = Form.BLOCKS
    window_block_tokens: int = 1
    grid_tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("block_tokens", "history_entries", "window_block_tokens", "grid_tokens"):
            if getattr(self, name) < 1:
                raise SpecError(f"layout.{name}: {getattr(self, name)} is less than 1")


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor's run of rows inside every object of its group.

    ``shape`` is the engine's own for as many rows as one object holds, ``row_axis`` the axis they
    lie on; in the bytes the rows come first and the other axes follow in order.
    """

    layer: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    row_axis: int
    rows: Rows
    unit: int
    offset_bytes: int

    @property
    def object_rows(self) -> int:
        """Rows that one object has room for."""
        return self.shape[self.row_axis]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this layer's tensor."""
        elements = 1
        for axis, size in enumerate(self.shape):
            elements *= 1 if axis == self.row_axis else size
        return elements * dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one object."""
        return self.object_rows * self.row_bytes

    def describe(self) -> dict[str, Any]:
        """The field as plain data, for the layout's digest and for people."""
        return {
            "layer": self.layer,
            "tensor": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "row_axis": self.row_axis,
            "rows": f"{self.rows}/{self.unit}",
            "offset_bytes": self.offset_bytes,
        }


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One cache group: its rule (``spec``) and where its tensors lie in an object."""

    spec: GroupSpec
    role: Role
    fields: tuple[Field, ...]

    @property
    def is_snapshot(self) -> bool:
        """Whether objects are states at one position rather than blocks."""
        return self.spec.form is Form.STATE

    def held(self, position: int, from_token: int) -> range:
        """Indices of the whole objects an engine at ``position`` holds that end after ``from_token``."""
        unit = self.spec.unit_tokens
        if self.is_snapshot:
            return range(position // unit - 1, position // unit)
        oldest = 0 if self.spec.window_tokens is None else max(0, position - self.spec.window_tokens + 1)
        return range(max(-(-oldest // unit), from_token // unit), position // unit)


@dataclass(frozen=True)
class Geometry:
    """All cache groups of one model's cache, in model order.

    ``model`` names the model's architecture and config (see :func:`model_identity`);
    ``layer_classes`` are the cache layer classes it was read from.
    """

    model: str
    family: str
    layer_classes: tuple[str, ...]
    shared_key_value: bool
    groups: tuple[GroupLayout, ...]

    def group(self, name: str) -> GroupLayout:
        """The group of that name. Raises GeometryMismatch, naming those there are."""
        for group in self.groups:
            if group.spec.name == name:
                return group
        known = ", ".join(group.spec.name for group in self.groups)
        raise GeometryMismatch(f"group {name!r} is not one of this model's cache ({known})")

    def model_spec(self, *, weights: str) -> ModelSpec:
        """The fabric's spec of this model under that weights revision."""
        return ModelSpec(name=self.model, weights=weights, groups=tuple(group.spec for group in self.groups))

    @cached_property
    def _rules(self) -> ModelSpec:
        return self.model_spec(weights="")

    @property
    def grid_tokens(self) -> int:
        """Tokens between positions that can be captured and resumed at."""
        return self._rules.grid_tokens

    @cached_property
    def layout_digest(self) -> str:
        """32 hex digits over the whole field table: two equal digests mean one byte layout."""
        return _digest(self.describe())

    def describe(self) -> list[dict[str, Any]]:
        """The field table as plain data."""
        return [
            {
                **group.spec.model_dump(mode="json", exclude_defaults=True),
                "fields": [field.describe() for field in group.fields],
            }
            for group in self.groups
        ]

    def check_position(self, position: int) -> None:
        """Raise GeometryMismatch unless ``position`` (tokens) is positive and on the grid."""
        if position < 1 or position % self.grid_tokens:
            raise GeometryMismatch(f"position {position}: must be a positive multiple of {self.grid_tokens} tokens")

    def required(self, position: int) -> dict[str, range]:
        """Indices, by group, of the objects that a resume at ``position`` needs: the fabric's own rule."""
        self.check_position(position)
        required = needs(self._rules, position)
        return {
            group.spec.name: ranges[0] if ranges else range(0)
            for group, ranges in zip(self.groups, required, strict=True)
        }


def replayable_groups(geometry: Geometry) -> frozenset[str]:
    """The groups that this adapter can compute again from the history: windows beside ordinary history.

    Raises UnsupportedCache, naming the group, for a model that has others: see ``replay``.
    """
    for group in geometry.groups:
        if group.role not in {Role.KV, Role.WINDOW} or group.is_snapshot:
            raise UnsupportedCache(f"{group.spec.name}: this adapter replays blocks of windows beside ordinary history")
    return frozenset(group.spec.name for group in geometry.groups if group.role is Role.WINDOW)


def model_identity(config: PreTrainedConfig) -> str:
    """Name of an architecture with its config: ``<model_type>-<16 hex digits>``.

    Two models with equal weights whose config differs (say in a rotary base, a window or an
    activation) hold different state for the same tokens; the name keeps their namespaces apart.
    """
    decoder = decoder_config(config)
    fields = {name: value for name, value in decoder.to_dict().items() if name not in _VOLATILE_CONFIG}
    return f"{decoder.model_type}-{_digest(fields)[:16]}"


def geometry_of(model: PreTrainedModel, options: LayoutOptions = LayoutOptions()) -> Geometry:
    """Read the geometry off a cache that ``model`` fills with a few tokens.

    Enough tokens are run that every compressor emits an entry, so that each tensor shows the shape
    and dtype it really has. Raises UnsupportedCache for state that no kind describes.
    """
    cache = fresh_cache(model.config)
    rates = [layer.compress_rate for layer in cache.layers if hasattr(layer, "compress_rate")]
    for index, layer in enumerate(cache.layers):
        adapter_of(index, layer)
    tokens = torch.zeros((1, max(rates, default=0) + 1), dtype=torch.long, device=model.device)
    try:
        with quiet(), torch.no_grad():
            feed(model, cache, tokens, logits_to_keep=1)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedCache(f"{type(model).__name__} does not run on a {type(cache).__name__}: {error}") from error
    return geometry_from_cache(cache, model.config, options)


def geometry_from_cache(cache: Cache, config: PreTrainedConfig, options: LayoutOptions) -> Geometry:
    """Read the geometry off a dynamic cache that holds at least one whole compressed entry a compressor.

    Raises UnsupportedCache for a cache or layer class or a tensor that no kind describes, and for a
    static layer: its tensors do not tell a window of W tokens from room for fewer.
    """
    check_cache_class(cache)
    shared = decoder_config(config).model_type == "deepseek_v4"
    members: dict[tuple[Role, int], list[tuple[int, Part, torch.Tensor]]] = {}
    for index, layer in enumerate(cache.layers):
        adapter = adapter_of(index, layer)
        if is_static(layer):
            raise UnsupportedCache(
                f"cache layer {index} is a {class_name(layer)}: read the geometry off the cache that the model makes"
                " (geometry_of), it holds for static caches too"
            )
        for part in adapter.parts(layer, shared):
            tensor = read(layer, part.name)
            if tensor is None:
                raise UnsupportedCache(f"cache layer {index} has no {part.name} yet: run more tokens through it first")
            if tensor.shape[0] != 1:
                raise UnsupportedCache(f"cache layer {index} holds a batch of {tensor.shape[0]}: capture one sequence")
            members.setdefault((part.role, part.unit), []).append((index, part, tensor))
    keys = sorted(members, key=lambda key: (list(_KINDS).index(key[0]), key[1]))
    return Geometry(
        model=model_identity(config),
        family=decoder_config(config).model_type,
        layer_classes=tuple(class_name(layer) for layer in cache.layers),
        shared_key_value=shared,
        groups=tuple(_group(role, unit, keys, members[role, unit], options) for role, unit in keys),
    )


def _group(
    role: Role,
    unit: int,
    keys: Iterable[tuple[Role, int]],
    members: list[tuple[int, Part, torch.Tensor]],
    options: LayoutOptions,
) -> GroupLayout:
    kind, of = _KINDS[role]
    snapshot = _is_snapshot(role, options)
    fields: list[Field] = []
    end = _POSITION_BYTES if snapshot else 0
    for layer, part, tensor in members:
        shape = list(tensor.shape)
        shape[part.row_axis] = part.rows.most(part.unit) if snapshot else _block_rows(role, options)
        offset = -(-end // tensor.element_size()) * tensor.element_size()
        fields.append(
            Field(
                layer=layer,
                name=part.name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(shape),
                row_axis=part.row_axis,
                rows=part.rows,
                unit=part.unit,
                offset_bytes=offset,
            )
        )
        end = offset + fields[-1].nbytes
    spec = GroupSpec(
        name=_name(role, unit, keys),
        kind=kind,
        of=None if of is None else _name(of, unit, keys),
        layers=tuple(sorted({layer for layer, _, _ in members})),
        block_bytes=end,
        alignment_bytes=max([_POSITION_BYTES if snapshot else 1, *(t.element_size() for _, _, t in members)]),
        **_cut(role, unit, members, options),
    )
    return GroupLayout(spec, role, tuple(fields))


def _name(role: Role, unit: int, keys: Iterable[tuple[Role, int]]) -> str:
    """The role's name, with its unit behind it where groups of that role differ in it."""
    alone = sum(1 for other, _ in keys if other is role) == 1
    return str(role) if alone else f"{role}_{unit}"


def _is_snapshot(role: Role, options: LayoutOptions) -> bool:
    if role is Role.WINDOW:
        return options.window_form is Form.STATE
    return role is Role.RECURRENT or _KINDS[role][0] is ObjectKind.UNCOMPRESSED_TAIL


def _block_rows(role: Role, options: LayoutOptions) -> int:
    match role:
        case Role.KV | Role.INDEX:
            return options.block_tokens
        case Role.WINDOW:
            return options.window_block_tokens
        case _:
            return options.history_entries


def _cut(
    role: Role, unit: int, members: list[tuple[int, Part, torch.Tensor]], options: LayoutOptions
) -> dict[str, Any]:
    """The fields of a GroupSpec that say how its kind is cut and what its rule needs."""
    if role is Role.WINDOW:
        window_tokens = unit + 1
        if options.window_form is Form.STATE:
            return {"form": Form.STATE, "grid_tokens": options.grid_tokens, "window_tokens": window_tokens}
        if unit % options.window_block_tokens:
            raise SpecError(
                f"layout.window_block_tokens: {options.window_block_tokens} does not divide the {unit} rows"
                f" that a window of {window_tokens} keeps, so its oldest block could never be filled"
            )
        return {"block_tokens": options.window_block_tokens, "window_tokens": window_tokens}
    if _is_snapshot(role, options):
        overlap = max((part.unit for _, part, _ in members if part.rows is Rows.OVERLAP), default=0)
        return {"form": Form.STATE, "grid_tokens": options.grid_tokens, "overlap_tokens": overlap}
    cut: dict[str, Any] = {"block_tokens": _block_rows(role, options) * unit}
    if _KINDS[role][0] is ObjectKind.COMPRESSED_HISTORY:
        cut["ratio"] = unit
    if unit > 1 and options.history_entries == 1:
        cut["endpoint_tokens"] = 1
    return cut


def _digest(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return blake3(canonical.encode(), derive_key_context="kvfabric 2026 transformers layout").hexdigest(16)

"""The engine's side of the ABI passport: one a cache group."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...fabric.passport import Abi, AbiPassport, abi_refusal
from .errors import GeometryMismatch
from .geometry import POSITION, Geometry, GroupLayout
from .rotary import rotary_convention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ENGINE = "transformers"
KERNEL_ABI = 1
"""Number of the byte layout that capture writes and restore reads; raised when either changes."""


def passports(config: PreTrainedConfig, geometry: Geometry) -> dict[str, AbiPassport]:
    """The passport of each group, by name: what a reader must agree in to read these bytes.

    Not the library's release: cache classes that hold the same tensors under another release keep
    the passport, and with it the cache.
    """
    return {group.spec.name: _passport(config, geometry, group) for group in geometry.groups}


def check_written(reader: Mapping[str, AbiPassport], written: Mapping[str, Abi]) -> None:
    """Raise GeometryMismatch, naming the group, unless this reader may read what was written."""
    for name, abi in written.items():
        own = reader.get(name)
        if own is None:
            raise GeometryMismatch(f"group {name!r} is not one of this model's cache ({', '.join(reader)})")
        refusal = abi_refusal(abi, own.abi())
        if refusal is not None:
            raise GeometryMismatch(f"{name}: written under another passport ({refusal}), recompute instead")


def _passport(config: PreTrainedConfig, geometry: Geometry, group: GroupLayout) -> AbiPassport:
    classes = {geometry.layer_classes[layer].rpartition(".")[2] for layer in group.spec.layers}
    return AbiPassport(
        engine=ENGINE,
        kernel="+".join(sorted(classes)),
        kernel_abi=KERNEL_ABI,
        layout="snapshot" if group.is_snapshot else "rows",
        metadata=f"{POSITION}:int64" if group.is_snapshot else "",
        dtype="+".join(sorted({field.dtype for field in group.fields})),
        byte_order=sys.byteorder,
        rotary=rotary_convention(config, frozenset(field.name for field in group.fields)),
        strides=tuple(field.row_bytes for field in group.fields),
        alignment_bytes=group.spec.alignment_bytes,
        token_alignment_tokens=group.spec.unit_tokens,
        fields=tuple(
            f"{field.layer}.{field.name} {field.dtype}{list(field.shape)} axis {field.row_axis}"
            f" {field.rows}/{field.unit} @{field.offset_bytes}"
            for field in group.fields
        ),
    )

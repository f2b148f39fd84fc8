"""Recompute leased state and compare: what makes silent wrongness visible in production.

Bit for bit where the recomputation cuts the tokens into the chunks that the writer did (``cuts``); a matrix product
over another number of rows may round differently, so otherwise within a tolerance: no element of a tensor may differ by
more than ``TOLERANCES`` of that tensor's largest magnitude. Integers and scalars must be equal in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...fabric.tally import AuditOutcome
from .capture import Objects, capture
from .geometry import Geometry, GroupLayout
from .library import feed, fresh_cache, quiet
from .tensors import Bytes, dtype_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}
"""By dtype; another dtype must be equal."""


def audit(
    model: PreTrainedModel, geometry: Geometry, tokens: Sequence[int], cache: Cache, cuts: Iterable[int] | None
) -> AuditOutcome:
    """What a prefill of ``tokens`` leaves, against a filled cache that stands behind them.

    ``cuts``: where the writer's chunks ended; None: not known.
    """
    position = len(tokens)
    leased = capture(cache, geometry, position)
    right = capture(_prefilled(model, tokens, cuts or ()), geometry, position)
    if all(_equal(leased[name], right[name]) for name in right):
        return AuditOutcome.EQUAL
    if cuts is None and all(_close(group, leased, right) for group in geometry.groups):
        return AuditOutcome.CLOSE
    return AuditOutcome.MISMATCH


def _prefilled(model: PreTrainedModel, tokens: Sequence[int], cuts: Iterable[int]) -> Cache:
    ends = (*sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens))
    cache = fresh_cache(model.config)
    with quiet(), torch.no_grad():
        for begin, end in zip((0, *ends), ends, strict=False):
            ids = torch.tensor([list(tokens[begin:end])], dtype=torch.long, device=model.device)
            feed(model, cache, ids, logits_to_keep=1)
    return cache


def _equal(leased: dict[int, Bytes], right: dict[int, Bytes]) -> bool:
    return leased.keys() == right.keys() and all(np.array_equal(leased[i], right[i]) for i in right)


def _close(group: GroupLayout, leased: Objects, right: Objects) -> bool:
    ours, theirs = leased[group.spec.name], right[group.spec.name]
    if ours.keys() != theirs.keys():
        return False
    if not theirs:
        return True
    a, b = (np.stack([objects[i] for i in sorted(objects)]) for objects in (ours, theirs))
    covered = np.zeros(a.shape[1], dtype=np.bool_)
    for field in group.fields:
        part = slice(field.offset_bytes, field.offset_bytes + field.nbytes)
        covered[part] = True
        if not _field_is_close(a[:, part], b[:, part], dtype_of(field.dtype)):
            return False
    return np.array_equal(a[:, ~covered], b[:, ~covered])


def _field_is_close(a: Bytes, b: Bytes, dtype: torch.dtype) -> bool:
    tolerance = TOLERANCES.get(dtype)
    if tolerance is None:
        return np.array_equal(a, b)
    ours, theirs = (torch.from_numpy(np.ascontiguousarray(x)).view(dtype).double() for x in (a, b))
    return bool(torch.isfinite(ours).all()) and bool(
        (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=torch.finfo(dtype).tiny)
    )

"""How many bytes a model's state takes: a token, a window, a checkpoint, a whole prompt.

Payload of all shards, without the padding of pages.
"""

from __future__ import annotations

from fractions import Fraction

from .kinds import Form, ObjectKind
from .model import GroupSpec, ModelSpec
from .needs import group_rule

_GLOBAL = (ObjectKind.COMPRESSED_HISTORY, ObjectKind.INDEXER)


def bytes_per_token(model: ModelSpec) -> float:
    """Bytes a token of global state: the history and indexer blocks, which grow with the prompt."""
    return float(_per_token(model))


def window_bytes_per_token(model: ModelSpec) -> float:
    """Bytes a token that windows would take if every row were kept."""
    windows = (g for g in model.groups if g.kind is ObjectKind.SLIDING_WINDOW and g.form is Form.BLOCKS)
    return float(sum((_row(model, group) for group in windows), Fraction()))


def fixed_bytes(model: ModelSpec) -> int:
    """Bytes of state that does not grow: full windows, tails and one snapshot of each state group.

    A window counts its window_tokens and sink_tokens rows, a tail the rows of its buffer: ratio,
    lag and overlap.
    """
    total = Fraction()
    for group in model.groups:
        if group.form is Form.STATE:
            total += group.block_bytes * model.shards
        elif group.kind not in _GLOBAL:
            total += _row(model, group) * _rows(model, group)
    return int(total)


def bytes_at(model: ModelSpec, tokens: int) -> int:
    """Bytes of payload at `tokens` tokens: global state plus fixed state."""
    return int(_per_token(model) * tokens) + fixed_bytes(model)


def _per_token(model: ModelSpec) -> Fraction:
    grows = (g for g in model.groups if g.kind in _GLOBAL and g.form is Form.BLOCKS)
    return sum((_row(model, group) for group in grows), Fraction())


def _row(model: ModelSpec, group: GroupSpec) -> Fraction:
    return Fraction(group.block_bytes * model.shards, group.unit_tokens)


def _rows(model: ModelSpec, group: GroupSpec) -> int:
    rule = group_rule(model, group)
    if rule.kind is ObjectKind.SLIDING_WINDOW:
        return rule.window + rule.sink
    return rule.ratio + rule.lag + rule.overlap

"""What a growing request outdates: blocks of windows and tails that no resume at its end needs.

Snapshots stay: each serves exactly its own position.
"""

from __future__ import annotations

from .kinds import Form, ObjectKind
from .model import ModelSpec
from .needs import group_rule


def retired_by_growth(model: ModelSpec, to_token: int) -> tuple[tuple[int, ...], ...]:
    """Per group the indices of blocks that leave when a request has grown to ``to_token`` tokens.

    Window blocks that meet neither the last window nor the sinks, and tail blocks that do not meet
    the tail at ``to_token``.
    """
    retired = []
    for group in model.groups:
        leaving: tuple[int, ...] = ()
        if group.form is Form.BLOCKS and group.kind in (ObjectKind.SLIDING_WINDOW, ObjectKind.UNCOMPRESSED_TAIL):
            rule = group_rule(model, group)
            unit = group.unit_tokens
            first = max(0, rule.run_start(to_token)) // unit
            sinks = -(-rule.sink // unit)
            leaving = tuple(range(min(sinks, first), first))
        retired.append(leaving)
    return tuple(retired)

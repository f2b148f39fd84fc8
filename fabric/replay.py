"""Replay: windows and tails that were not kept are computed again from history that was.

A window layer's state at Q depends on the tokens before it as far back as the layers below can see:
each layer that looks back ``span`` tokens adds so many. So running the model over [Q - R, Q), with the
history of all tokens before Q at hand and empty windows at the start, leaves exactly the windows and
tails that a prefill would have left at Q, if R is at least the sum of the spans of all such layers
(layers x window, where all are alike). What is computed before that is thrown away.

    Source: DeepSeek-V4's "zero SWA caching"; checked on a tiny DeepSeek-V4, where R = window alone
    changed the logits and R = layers x window did not.

A shorter replay, of the window alone say, is approximate: what it leaves is near to what a prefill would
have left, and is not it. It happens only to a request that names its length, is labelled in the answer,
and what is computed from it belongs into a namespace of its own.

Recurrent state is not bounded in what it looks back on, so a model that has any replays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .kinds import Form, ObjectKind
from .model import GroupSpec, ModelSpec
from .needs import PerModel


@dataclass(frozen=True, slots=True)
class Replay:
    """How one model replays. ``model``: its rules with nothing needed of what replay rebuilds, but sinks.

    ``exact_tokens``: how far before a position computing must begin; ``groups``: those that are rebuilt.
    """

    model: ModelSpec
    exact_tokens: int
    groups: tuple[int, ...]

    def length(self, tokens: int | None) -> int:
        """How many tokens are replayed for a request that names ``tokens``, or (None) wants what is exact."""
        return self.exact_tokens if tokens is None else min(tokens, self.exact_tokens)

    def start(self, position: int, tokens: int | None = None) -> int:
        """Where computing begins for a position; without ``tokens``, so that all state there is exact."""
        return max(0, position - self.length(tokens))

    def is_exact(self, position: int, start: int) -> bool:
        """Whether computing from ``start`` leaves at ``position`` what a prefill would have left."""
        return start <= self.start(position)


def _replay(model: ModelSpec) -> Replay | None:
    rebuilt = tuple(i for i, group in enumerate(model.groups) if _span(model, group) is not None)
    unbounded = any(group.form is Form.STATE and _span(model, group) is None for group in model.groups)
    if not model.replay or not rebuilt or unbounded:
        return None
    groups = tuple(_needing_nothing(group) if i in rebuilt else group for i, group in enumerate(model.groups))
    # Built without checks: a window of one token stands for what needs nothing, of whatever kind.
    plain = ModelSpec.model_construct(
        name=model.name,
        weights=model.weights,
        groups=groups,
        shards=model.shards,
        drop_last_blocks=model.drop_last_blocks,
        plan=model.plan,
        replay=False,
    )
    return Replay(plain, _exact(model), rebuilt)


replay_of = PerModel(_replay)
"""How a model replays; None where it does not, by its spec or because some state looks back for ever."""


def exact_replay_tokens(model: ModelSpec) -> int | None:
    """How many tokens an exact replay computes again; None for a model that cannot."""
    replay = replay_of(model)
    return None if replay is None else replay.exact_tokens


def shortest_replay_tokens(model: ModelSpec) -> int | None:
    """How many tokens the shortest sensible replay computes again: all that one layer looks back on.

    It fills every window and tail, and is approximate where more than one layer has them. None for a
    model that replays nothing.
    """
    if replay_of(model) is None:
        return None
    return max(span for group in model.groups if (span := _span(model, group)) is not None)


def _span(model: ModelSpec, group: GroupSpec) -> int | None:
    """How many tokens a layer of this group looks back on raw; None where replay does not rebuild it."""
    if group.kind is ObjectKind.SLIDING_WINDOW:
        return group.window_tokens
    if group.kind is ObjectKind.UNCOMPRESSED_TAIL:
        history = model.history_of(group)
        return None if history.form is Form.STATE else history.ratio - 1 + history.lag_tokens + group.overlap_tokens
    return None


def _exact(model: ModelSpec) -> int:
    """The spans of all layers together; groups that name no layers share one."""
    spans: dict[int | None, int] = {}
    for group in model.groups:
        span = _span(model, group)
        for layer in _layers(group) if span is not None else ():
            spans[layer] = max(spans.get(layer, 0), span or 0)
    return sum(spans.values())


def _layers(group: GroupSpec) -> Iterator[int | None]:
    if group.layers:
        yield from group.layers
    else:
        yield None


def _needing_nothing(group: GroupSpec) -> GroupSpec:
    """The same objects, of which a resume needs none but the sinks."""
    return group.model_copy(
        update={
            "kind": ObjectKind.SLIDING_WINDOW,
            "form": Form.BLOCKS,
            "block_tokens": group.unit_tokens,
            "grid_tokens": None,
            "endpoint_tokens": group.endpoint_unit_tokens,
            "window_tokens": 1,
            "of": None,
            "overlap_tokens": 0,
        }
    )

"""What a writer leaves behind, and whether anybody could ever resume from it.

``keep_tokens`` says how much of a group a store keeps behind its end: objects that lie wholly
within [end - keep_tokens, end), and snapshots whose last token does.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, lcm

from .erosion import erosion_of
from .model import GroupSpec, ModelSpec
from .needs import Rules, needs_past, rules_of

POSITIONS_MAX = 1 << 16
"""How many positions :func:`never_hits` looks at before it lets a spec pass."""


def kept(model: ModelSpec, tokens: int) -> tuple[range, ...]:
    """Per group, the objects that a store of a prompt's first `tokens` tokens publishes.

    Every whole block, and a snapshot at each multiple of the model's resume grid, less what
    ``keep_tokens`` leaves out.
    """
    rules = rules_of(model)
    return tuple(
        _snapshots(rule.unit, rules.grid, group.keep_tokens, tokens)
        if rule.state
        else _blocks(rule.unit, group.keep_tokens, tokens)
        for rule, group in zip(rules.groups, model.groups, strict=True)
    )


def _blocks(unit: int, keep: int | None, tokens: int) -> range:
    first = 0 if keep is None else max(0, -(-(tokens - keep) // unit))
    return range(first, max(first, tokens // unit))


def _snapshots(unit: int, grid: int, keep: int | None, tokens: int) -> range:
    first = 1 if keep is None else max(1, (tokens - keep) // grid + 1)
    last, stride = tokens // grid, grid // unit
    return range(first * stride - 1, last * stride, stride) if first <= last else range(0)


def never_hits(model: ModelSpec) -> str | None:
    """Why no prompt of any length, once stored, could ever be resumed; None if some prompt could.

    Exact: what a position needs is, relative to it, periodic once windows, lags and overlaps no
    longer reach back to the start, so one period behind each such point decides. A spec whose
    period has more than :data:`POSITIONS_MAX` positions passes if none of those is decisive.
    """
    keepers = [group.name for group in model.groups if group.keep_tokens is not None]
    if not keepers or _some_prompt_hits(model, keepers):
        return None
    alone = [name for name in keepers if not _some_prompt_hits(model, [name])]
    named = alone or keepers
    fields = ", ".join(f"groups.{name}.keep_tokens" for name in named)
    left = ", ".join(str(model.group(name).keep_tokens) for name in named)
    return f"{fields}: {left} tokens behind the end of a store leave less than a resume at any position needs"


def _some_prompt_hits(model: ModelSpec, keepers: list[str]) -> bool:
    """Whether some store, of which only the `keepers` leave things out, serves some position."""
    return any(_stores_serving(model, keepers, p) for p in _decisive(model))


def _decisive(model: ModelSpec) -> Iterator[int]:
    """Grid positions one of which can be served if any can, the most likely first."""
    rules = rules_of(model)
    period = lcm(rules.grid, *(rule.unit for rule in rules.groups), *(rule.ratio for rule in rules.groups))
    bends = {0}
    for rule in rules.groups:
        bends |= {rule.window, rule.lag + rule.ratio, rule.lag + rule.ratio + rule.overlap}
    seen: set[int] = set()
    for bend in sorted(bends):
        for p in range(bend // rules.grid * rules.grid + rules.grid, bend + period + rules.grid, rules.grid):
            if p not in seen:
                seen.add(p)
                yield p
            if len(seen) >= POSITIONS_MAX:
                return


def _stores_serving(model: ModelSpec, keepers: list[str], p: int) -> bool:
    """Whether a store of some length leaves everything that a resume at p needs."""
    rules = rules_of(model)
    shortest, longest = p, inf
    for group, rule, required in zip(model.groups, rules.groups, needs_past(model, p), strict=True):
        if not required:
            continue
        shortest = max(shortest, required[-1].stop * rule.unit)
        if group.name in keepers and group.keep_tokens is not None:
            # A snapshot is the state after its last token, which must lie within what is kept.
            first = p - 1 if rule.state else required[0].start * rule.unit
            longest = min(longest, first + group.keep_tokens)
    if shortest > longest:
        return False
    return erosion_of(model).anchored or any(
        _promises(rules, group, group.name in keepers, p, (shortest, longest)) for group in model.groups
    )


def _promises(rules: Rules, group: GroupSpec, keeper: bool, p: int, lengths: tuple[int, float]) -> bool:
    """Whether a store of one of these lengths keeps a block that promises p or more.

    Asked only of models whose groups may need nothing around p: lags, tails that are empty there.
    """
    unit, (shortest, longest) = group.unit_tokens, lengths
    keep = inf if not keeper or group.keep_tokens is None else group.keep_tokens
    first = p if keep == inf else max(p, int(shortest - keep) // rules.grid * rules.grid)
    for q in range(first, first + lcm(unit, rules.grid) + rules.grid, rules.grid):
        end = -(-q // unit) * unit
        if max(shortest, end) <= min(longest, end - unit + keep):
            return True
    return False

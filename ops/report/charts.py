"""Charts as inline SVG: lines, stacked areas, bars. Nothing is loaded, nothing runs.

Colours come from CSS classes ``c0`` .. ``c9`` of the page, so that both colour schemes are served. A title
element on each mark tells its value where a pointer rests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 30
COLOURS = 10
TICKS = 5

Number = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One named row of values, one for each x; None where there is nothing to draw."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes say: numbers as words, and the largest y (None: of the data)."""

    x: Number
    y: Number
    y_max: float | None = None
    label: str = ""
    y_base: int = 10


@dataclass(slots=True)
class _Frame:
    """From data to the picture's coordinates."""

    x_min: float
    x_max: float
    y_max: float
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_min) / ((self.x_max - self.x_min) or 1.0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / (self.y_max or 1.0) * (HEIGHT - TOP - BOTTOM)


def ticks(first: float, last: float, *, base: int = 10) -> list[float]:
    """Round numbers from ``first`` to ``last``, a handful. ``base`` 1024: round in its powers, for bytes."""
    if last <= first:
        return [first]
    rough = (last - first) / TICKS
    power = float(base) ** floor(log(rough, base) + 1e-12)
    steps = (1, 2, 5, 10) if base == 10 else tuple(1 << i for i in range(11))
    step = next(power * m for m in steps if power * m >= rough * (1 - 1e-9))
    return [step * i for i in range(ceil(first / step - 1e-9), floor(last / step + 1e-9) + 1)]


def lines(xs: Sequence[float], rows: Sequence[Line], axes: Axes) -> str:
    """Each row as a line over ``xs``."""
    frame = _frame(xs, max((v for row in rows for v in row.values if v is not None), default=0.0), axes)
    for number, row in enumerate(rows):
        for run in _runs(xs, row.values):
            points = " ".join(f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in run)
            if len(run) == 1:
                x, v = run[0]
                frame.parts.append(
                    f'<circle class="c{number % COLOURS}" cx="{frame.x(x):.1f}" cy="{frame.y(v):.1f}" r="2"/>'
                )
            else:
                frame.parts.append(f'<polyline class="line c{number % COLOURS}" points="{points}"/>')
    return _svg(frame, axes) + _legend([row.name for row in rows])


def areas(xs: Sequence[float], rows: Sequence[Line], axes: Axes) -> str:
    """The rows on top of each other, the first at the bottom."""
    floor_of = [0.0] * len(xs)
    tops = []
    for row in rows:
        tops.append([below + (value or 0.0) for below, value in zip(floor_of, row.values, strict=True)])
        floor_of = tops[-1]
    frame = _frame(xs, max(floor_of, default=0.0), axes)
    below = [0.0] * len(xs)
    for number, top in enumerate(tops):
        there = [*zip(xs, top, strict=True), *reversed(list(zip(xs, below, strict=True)))]
        points = " ".join(f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in there)
        frame.parts.append(
            f'<polygon class="c{number % COLOURS}" points="{points}"><title>{escape(rows[number].name)}</title></polygon>'
        )
        below = top
    return _svg(frame, axes) + _legend([row.name for row in rows])


def bars(names: Sequence[str], values: Sequence[float], words: Number) -> str:
    """One horizontal bar a name, the longest first as given; the value beside it."""
    top, height = max(values, default=0.0) or 1.0, 22
    wide, left = WIDTH - 300, 190
    parts = []
    for row, (name, value) in enumerate(zip(names, values, strict=True)):
        y = row * height + 4
        length = max(value / top * wide, 1.0)
        parts.append(f'<text class="name" x="{left - 8}" y="{y + 13}">{escape(name)}</text>')
        parts.append(f'<rect class="c{row % COLOURS}" x="{left}" y="{y}" width="{length:.1f}" height="{height - 6}"/>')
        parts.append(f'<text x="{left + length + 6:.1f}" y="{y + 13}">{escape(words(value))}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {len(names) * height + 8}" role="img">{"".join(parts)}</svg>'


def columns(names: Sequence[str], counts: Sequence[int], label: str) -> str:
    """A histogram: one column a bucket, named by its upper end."""
    axes = Axes(str, lambda v: f"{v:.0f}", label=label)
    frame = _Frame(0, max(len(counts), 1), max(counts, default=0) or 1)
    step = max(1, ceil(len(names) / 12))
    for place, (name, count) in enumerate(zip(names, counts, strict=True)):
        left, right = frame.x(place), frame.x(place + 1)
        top = frame.y(count)
        frame.parts.append(
            f'<rect class="c0" x="{left + 1:.1f}" y="{top:.1f}" width="{max(right - left - 2, 1):.1f}"'
            f' height="{HEIGHT - BOTTOM - top:.1f}"><title>up to {escape(name)}: {count}</title></rect>'
        )
        if place % step == 0:
            frame.parts.append(f'<text class="x" x="{(left + right) / 2:.1f}" y="{HEIGHT - 12}">{escape(name)}</text>')
    return _svg(frame, axes, x_axis=False)


def _frame(xs: Sequence[float], largest: float, axes: Axes) -> _Frame:
    top = axes.y_max if axes.y_max is not None else largest
    return _Frame(min(xs, default=0.0), max(xs, default=1.0), top or 1.0)


def _runs(xs: Sequence[float], values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The stretches between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, value in zip(xs, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x, value))
    return [run for run in runs if run]


def _svg(frame: _Frame, axes: Axes, *, x_axis: bool = True) -> str:
    grid = []
    for value in ticks(0.0, frame.y_max, base=axes.y_base):
        y = frame.y(value)
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{escape(axes.y(value))}</text>')
    if x_axis:
        for value in ticks(frame.x_min, frame.x_max):
            x = frame.x(value)
            anchor = ' style="text-anchor:end"' if x > WIDTH - RIGHT - 20 else ""
            grid.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 12}"{anchor}>{escape(axes.x(value))}</text>')
    label = escape(axes.label)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(grid)}{"".join(frame.parts)}</svg>'


def _legend(names: Sequence[str]) -> str:
    keys = (f'<span><i class="c{n % COLOURS}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return f'<p class="legend">{"".join(keys)}</p>'

"""One HTML page of a series: self-contained, no script, nothing loaded from anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from html import escape

from ...fabric.kinds import ObjectKind, Tier
from ...fabric.series import BOUNDS_S, Sample, quantile_s
from .charts import Axes, Line, areas, bars, columns, lines
from .series import Series

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for this page: nothing."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #667085; --grid: #e4e7ec; --paper: #fff; --panel: #f8f9fb;
 --c0: #2563a8; --c1: #d97706; --c2: #15803d; --c3: #b91c1c; --c4: #7c3aed; --c5: #0e7490; --c6: #a16207; --c7: #be185d;
 --c8: #475569; --c9: #4d7c0f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e9f0; --faint: #98a2b3; --grid: #2f3a4a; --paper: #11161d;
 --panel: #171e27; --c0: #60a5fa; --c1: #fbbf24; --c2: #4ade80; --c3: #f87171; --c4: #a78bfa; --c5: #22d3ee;
 --c6: #eab308; --c7: #f472b6; --c8: #94a3b8; --c9: #a3e635; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 1.5rem;
 max-width: 78rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 0 0 .2rem; }
p.note { color: var(--faint); margin: 0 0 .6rem; font-size: .87rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; margin-top: 1rem; }
section { background: var(--panel); border: 1px solid var(--grid); border-radius: .5rem; padding: 1rem; min-width: 0; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin-top: 1rem; }
.numbers div { background: var(--panel); border: 1px solid var(--grid); border-radius: .5rem; padding: .5rem .9rem; }
.numbers b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--faint); font-size: .85rem; }
svg { width: 100%; height: auto; font-size: 12px; } svg text { fill: var(--faint); }
svg text.x { text-anchor: middle; } svg text.y, svg text.name { text-anchor: end; } svg text.name { fill: var(--ink); }
.grid { stroke: var(--grid); } .line { fill: none !important; stroke-width: 2; stroke-linejoin: round; }
.line.c0 { stroke-width: 5; } .line.c1 { stroke-width: 3.5; }
.legend { margin: .3rem 0 0; font-size: .85rem; } .legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .35em; }
table { border-collapse: collapse; font-size: .9rem; } td, th { text-align: left; padding: .15rem 1rem .15rem 0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
""" + "\n".join(
    f".c{n} {{ fill: var(--c{n}); background: var(--c{n}); }} .line.c{n} {{ stroke: var(--c{n}); }}" for n in range(10)
)


def page(series: Series) -> str:
    """The page; of a series without samples one that says so."""
    samples = series.samples
    body = _of_samples(series) if samples else "<p>Nothing was sampled yet.</p>"
    clock = "simulated time" if series.clock == "simulated" else "time on the clock"
    span = seconds(samples[-1].at_s - samples[0].at_s) if samples else "0 s"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(series.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(series.title)}</h1>\n"
        f'<p class="note">kvfabric report of a {series.source}: {len(samples)} samples over {span} of {clock}.</p>\n'
        f"{body}\n</body>\n</html>\n"
    )


def _of_samples(series: Series) -> str:
    samples, last = series.samples, series.samples[-1]
    parts = [_numbers(last), "<main>"]
    parts.append(_section("Hit over time", _HIT_NOTE, _hits(samples)))
    parts.append(_section("Why tokens were lost", _LOST_NOTE, _lost(last)))
    parts.append(_section("Lost tokens over time", "A second, by reason.", _lost_over_time(samples)))
    parts.extend(
        _section(f"Held: {_TIER_WORDS[tier]}", "Bytes by kind of object.", _occupancy(samples, tier))
        for tier in _tiers(samples)
    )
    parts.append(_section("Recovery latency", _recovery_note(last), _histogram(last.recovery, "acquires")))
    parts.append(
        _section(
            "Recovery over time",
            "Half of the acquires that restored took at most so long, and 99 %.",
            _recovery(samples),
        )
    )
    parts.append(_section("Lease life", _life_note(last), _histogram(last.lease_life, "leases")))
    parts.append(_section("Bytes moved", "A second: between holders, from tiers, to tiers.", _moved(samples)))
    if series.facts:
        parts.append(_section("Facts", "", _table(series.facts)))
    parts.append("</main>")
    return "\n".join(parts)


_HIT_NOTE = (
    "Of the tokens asked for: promised by equal hashes, allowed by every group's rules, and covered by a granted lease."
    " What lies between the lines was not reusable, or not in time."
)
_LOST_NOTE = "Tokens that hashes promised and no lease covered, by the reason of the answer."
_TIER_WORDS = {
    Tier.G1: "GPU memory (G1)",
    Tier.G2: "host memory (G2)",
    Tier.G3: "local disk (G3)",
    Tier.G4: "remote store (G4)",
}


def _section(title: str, note: str, content: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{content}</section>'


def _numbers(last: Sample) -> str:
    shown = [
        ("requests", count(last.requests)),
        ("tokens asked for", count(last.tokens)),
        ("hash hit", _share(last.hash_hit_tokens, last.tokens)),
        ("usable hit", _share(last.usable_hit_tokens, last.tokens)),
        ("effective hit", _share(last.effective_hit_tokens, last.tokens)),
        ("objects restored", count(last.restores)),
        ("evictions", count(last.evictions)),
        ("fetched", nbytes(last.moved_bytes)),
    ]
    return f'<div class="numbers">{"".join(f"<div><b>{value}</b><span>{name}</span></div>" for name, value in shown)}</div>'


def _hits(samples: Sequence[Sample]) -> str:
    def share(get: Callable[[Sample], int]) -> list[float | None]:
        asked = _steps(samples, lambda s: s.tokens)
        return [100.0 * got / of if of else None for got, of in zip(_steps(samples, get), asked, strict=True)]

    rows = [
        Line("hash", share(lambda s: s.hash_hit_tokens)),
        Line("usable", share(lambda s: s.usable_hit_tokens)),
        Line("effective", share(lambda s: s.effective_hit_tokens)),
    ]
    return lines(_ends(samples), rows, Axes(seconds, lambda v: f"{v:.0f} %", 100.0, "hit, per cent of tokens"))


def _lost(last: Sample) -> str:
    by_size = sorted(((n, str(reason)) for reason, n in last.lost_tokens.items() if n), reverse=True)
    if not by_size:
        return "<p>None were lost.</p>"
    return bars([reason for _, reason in by_size], [float(n) for n, _ in by_size], count)


def _lost_over_time(samples: Sequence[Sample]) -> str:
    reasons = sorted({r for s in samples for r, n in s.lost_tokens.items() if n}, key=str)
    rows = [Line(str(r), _rates(samples, lambda s, r=r: s.lost_tokens.get(r, 0))) for r in reasons]  # type: ignore[misc]
    return areas(_ends(samples), rows, Axes(seconds, count, label="tokens lost a second"))


def _tiers(samples: Sequence[Sample]) -> list[Tier]:
    found = {tier for s in samples for tiers in s.occupancy_bytes.values() for tier, size in tiers.items() if size}
    return sorted(found, key=str)


def _occupancy(samples: Sequence[Sample], tier: Tier) -> str:
    kinds = [k for k in ObjectKind if any(s.occupancy_bytes.get(k, {}).get(tier) for s in samples)]
    rows = [Line(str(k), [float(s.occupancy_bytes.get(k, {}).get(tier, 0)) for s in samples]) for k in kinds]
    return areas([s.at_s for s in samples], rows, Axes(seconds, nbytes, label=f"bytes held on {tier}", y_base=1024))


def _recovery_note(last: Sample) -> str:
    return f"How long acquires took that had to restore. {_quantiles(last.recovery)}"


def _life_note(last: Sample) -> str:
    return f"From grant to release, or to the end of the grace. {_quantiles(last.lease_life)}"


def _quantiles(counts: Sequence[int]) -> str:
    half, most = quantile_s(counts, 0.5), quantile_s(counts, 0.99)
    if half is None or most is None:
        return ""
    return f"{count(sum(counts))} in all; half within {seconds(half)}, 99 % within {seconds(most)}."


def _histogram(counts: Sequence[int], what: str) -> str:
    """The buckets from the first that has any to the last."""
    used = [i for i, n in enumerate(counts) if n]
    if not used:
        return "<p>None yet.</p>"
    names = [*map(seconds, BOUNDS_S), f"> {seconds(BOUNDS_S[-1])}"]
    first, end = max(used[0] - 1, 0), min(used[-1] + 2, len(counts))
    return columns(names[first:end], counts[first:end], f"{what}, by how long")


def _recovery(samples: Sequence[Sample]) -> str:
    pairs = list(itertools.pairwise(samples))
    between = [[n - m for n, m in zip(b.recovery, a.recovery, strict=True)] for a, b in pairs]
    if not any(map(sum, between)):
        return "<p>None yet.</p>"
    rows = [Line(name, [quantile_s(c, share) for c in between]) for name, share in (("50 %", 0.5), ("99 %", 0.99))]
    return lines(_ends(samples), rows, Axes(seconds, seconds, label="seconds"))


def _moved(samples: Sequence[Sample]) -> str:
    rows = [
        Line("fetched from holders", _rates(samples, lambda s: s.moved_bytes)),
        Line("restored", _rates(samples, lambda s: s.restored_bytes)),
        Line("written to tiers", _rates(samples, lambda s: s.written_bytes)),
    ]
    return lines(_ends(samples), rows, Axes(seconds, nbytes, label="bytes a second", y_base=1024))


def _table(facts: dict[str, str | int | float]) -> str:
    rows = (f'<tr><td>{escape(name)}</td><td class="n">{escape(str(value))}</td></tr>' for name, value in facts.items())
    return f"<table>{''.join(rows)}</table>"


# --- steps between samples ---------------------------------------------------------------------


def _ends(samples: Sequence[Sample]) -> list[float]:
    """When each step ends."""
    return [s.at_s for s in samples[1:]]


def _steps(samples: Sequence[Sample], get: Callable[[Sample], int]) -> list[int]:
    """How much a total grew in each step; a new life of a holder begins at nothing."""
    return [max(get(b) - get(a), 0) for a, b in itertools.pairwise(samples)]


def _rates(samples: Sequence[Sample], get: Callable[[Sample], int]) -> list[float | None]:
    lasted: Iterable[float] = (b.at_s - a.at_s for a, b in itertools.pairwise(samples))
    return [grown / max(took, 1e-9) for grown, took in zip(_steps(samples, get), lasted, strict=True)]


# --- words -------------------------------------------------------------------------------------


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def seconds(value: float) -> str:
    """A duration in its own unit."""
    if value < 1:
        return f"{value * 1000:.3g} ms" if value else "0 s"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    place = 0
    while abs(value) >= base and place < len(units) - 1:
        value /= base
        place += 1
    shown = f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"  # never 1e+03
    return f"{shown} {units[place]}".rstrip()


def count(value: float) -> str:
    """A count, thousands shortened."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T"))


def nbytes(value: float) -> str:
    """Bytes in binary units."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))

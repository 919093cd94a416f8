"""The page of a report: one self-contained file without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from .costs import Costs
from .drawing import COLOURS, STYLE, Axis, Curve, Point, lines, scatter, standalone
from .units import flops_text, percent_text, size_text

_STYLE = """
.remat-report { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; max-width: 860px; padding: .4em 1em; }
.remat-report { color: #202124; background: #fff; }
.remat-report h1 { font-size: 1.5em; margin: 0; }
.remat-report h2 { font-size: 1.1em; margin: 2.2em 0 .5em; }
.remat-report p { margin: .3em 0 .8em; color: #5f6368; max-width: 70ch; }
.remat-report table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.remat-report th { text-align: left; font-weight: 600; color: #5f6368; border-bottom: 1px solid #8a8f9866; }
.remat-report th, .remat-report td { padding: .35em .7em .35em 0; vertical-align: middle; }
.remat-report td { border-bottom: 1px solid #8a8f9833; }
.remat-report .number { text-align: right; white-space: nowrap; }
.remat-report th.number { text-align: right; }
.remat-report .bar { display: block; height: 7px; border-radius: 3px; min-width: 1px; }
.remat-report .track { width: 100px; }
.remat-report td:first-child { min-width: 17em; }
.remat-report .chip { display: inline-block; flex: none; width: .75em; height: .75em; border-radius: .2em; }
.remat-report .label { display: flex; align-items: center; gap: .55em; font-size: .93em; overflow-wrap: anywhere; }
.remat-report .best .label { font-weight: 600; }
.remat-report code { font: .92em ui-monospace, monospace; overflow-wrap: anywhere; }
.remat-report svg { width: 100%; height: auto; }
.remat-report details { margin: .4em 0; } .remat-report summary { cursor: pointer; padding: .25em 0; }
.remat-report .legend { display: flex; flex-wrap: wrap; max-width: none; gap: .2em 1.4em; }
@media (prefers-color-scheme: dark) {
.remat-report { color: #e8eaed; background: #17191d; } .remat-report p, .remat-report th { color: #a8adb5; }
}
"""


def document(name: str, body: str) -> str:
    """A whole page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(name)}: remat report</title>
<style>
body {{ margin: 1.6em auto; max-width: 900px; background: #fff; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #17191d; }} }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def fragment(name: str, environment: Mapping[str, str], rows: Sequence[Costs], best: Sequence[Costs]) -> str:
    """The content of the page, to be embedded in another page, such as a notebook."""
    parts = [
        f'<div class="remat-report"><style>{_STYLE}{STYLE}</style>',
        f"<h1>{escape(name)}</h1><p>{escape(', '.join(environment.values()))}</p>",
        _table(rows, best),
        "<p>Saved: bytes alive at the end of the forward. Peak: the most bytes alive at any time. Arguments and "
        "captured tensors are not counted. FLOPs are those of matrix products, convolutions and attention. In bold: "
        "policies that no other row beats in both peak and recomputed FLOPs.</p>",
        "<h2>Peak against FLOPs recomputed</h2>",
        tradeoff(rows, best),
        "<h2>Live bytes over the operations</h2>",
        '<p class="legend">' + "".join(_chip(i, row.label) for i, row in enumerate(rows)) + "</p>",
        _timeline(rows),
        "<p>A dot marks the end of the forward.</p>",
        "<h2>What is saved, by module and operation</h2>",
        *(_residuals(i, row) for i, row in enumerate(rows)),
        "</div>",
    ]
    return "\n".join(parts)


def _chip(i: int, label: str) -> str:
    colour = COLOURS[i % len(COLOURS)]
    return f'<span class="label"><i class="chip" style="background:{colour}"></i><span>{escape(label)}</span></span>'


def _table(rows: Sequence[Costs], best: Sequence[Costs]) -> str:
    plain = rows[0]
    device = any(row.device_peak_bytes is not None for row in rows)
    heads = ["<th></th>", '<th class="number">saved</th><th></th>', '<th class="number">peak</th><th></th>']
    if device:
        heads.append('<th class="number">peak of the allocator</th>')
    heads.append('<th class="number" colspan="2">FLOPs recomputed</th>')
    lines = []
    for i, row in enumerate(rows):
        cells = [f"<td>{_chip(i, row.label)}</td>"]
        for part, whole in (
            (row.saved_bytes, max(each.saved_bytes for each in rows)),
            (row.peak_bytes, max(each.peak_bytes for each in rows)),
        ):
            cells.append(f'<td class="number">{size_text(part)}</td><td class="track">{_bar(i, part, whole)}</td>')
        if device:
            cells.append(f'<td class="number">{size_text(row.device_peak_bytes or 0)}</td>')
        share = percent_text(row.recomputed_flops, plain.flops)
        cells.append(f'<td class="number">{flops_text(row.recomputed_flops)}</td><td class="number">{share}</td>')
        lines.append(f'<tr class="{"best" if row in best else ""}">{"".join(cells)}</tr>')
    return f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _bar(i: int, part: int, whole: int) -> str:
    width = 100 * part / whole if whole else 0
    return f'<span class="bar" style="width:{width:.1f}%;background:{COLOURS[i % len(COLOURS)]}"></span>'


def tradeoff(rows: Sequence[Costs], best: Sequence[Costs], alone: bool = False) -> str:
    """The picture of the peak against recomputed FLOPs."""
    points = [
        Point(row.label, row.recomputed_flops, row.peak_bytes, i, f"{row.label}: peak {size_text(row.peak_bytes)}")
        for i, row in enumerate(rows)
    ]
    front = [point for row, point in zip(rows, points) if row in best]
    chart = scatter(points, Axis("FLOPs recomputed", flops_text), Axis("peak bytes", size_text, 1024), front)
    return standalone(chart) if alone else chart


def _timeline(rows: Sequence[Costs]) -> str:
    curves = [Curve(row.label, row.timeline, i, row.forward_operations) for i, row in enumerate(rows)]
    return lines(curves, Axis("operations", str), Axis("live bytes", size_text, 1024))


def _residuals(i: int, row: Costs) -> str:
    shares = row.shares
    most = max((share.nbytes for share in shares), default=0)
    lines = [
        f"<tr><td><code>{escape(share.module or '')}</code></td><td><code>{escape(share.op)}</code>"
        f"{f' named <code>{escape(share.name)}</code>' if share.name else ''}</td>"
        f'<td class="number">{share.count}</td><td class="number">{size_text(share.nbytes)}</td>'
        f'<td class="track">{_bar(i, share.nbytes, most)}</td></tr>'
        for share in shares
    ]
    head = '<th>module</th><th>operation</th><th class="number">tensors</th><th class="number">saved</th><th></th>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    summary = f"<summary>{escape(row.label)}: {size_text(row.saved_bytes)}</summary>"
    return f"<details{' open' * (i == 1)}>{summary}{table if shares else '<p>Nothing.</p>'}</details>"

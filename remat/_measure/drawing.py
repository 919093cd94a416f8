"""Charts as SVG: labelled points, and lines. The text depends only on the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Colours that colour-blind readers can distinguish; the first one is for the baseline.
COLOURS = ["#7a7f87", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1"]
STYLE = """
.remat-chart text { font: 12px system-ui, sans-serif; fill: #3c4043; }
.remat-chart .title { font-weight: 600; }
.remat-chart .grid { stroke: #8a8f98; stroke-opacity: .22; }
.remat-chart .axis { stroke: #8a8f98; }
.remat-chart .front { fill: none; stroke: #8a8f98; stroke-dasharray: 4 4; stroke-opacity: .8; }
.remat-chart .line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.remat-chart .halo { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }
@media (prefers-color-scheme: dark) {
.remat-chart text { fill: #d5d9df; } .remat-chart .halo { stroke: #17191d; }
}
"""
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 96, 24, 16, 52
TICKS = 5


@dataclass(frozen=True)
class Point:
    """A point with its label. Points of one series share a colour and a shape."""

    label: str
    x: float
    y: float
    series: int = 0
    hint: str = ""


@dataclass(frozen=True)
class Curve:
    """A line through numbers, one of which may be marked."""

    label: str
    values: Sequence[float]
    series: int = 0
    marked: int | None = None


@dataclass(frozen=True)
class Axis:
    """An axis: its title and number format; ``base`` is 1024 for bytes, else 1000."""

    title: str
    text: Callable[[int], str]
    base: int = 1000


class _Frame:
    """The scale of a chart: positions of numbers."""

    def __init__(self, height: int, most: tuple[float, float], top: int = TOP) -> None:
        self.height, self.top = height, top
        self.most = tuple(value or 1.0 for value in most)

    def x(self, value: float) -> float:
        return round(LEFT + value / self.most[0] * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(self.height - BOTTOM - value / self.most[1] * (self.height - self.top - BOTTOM), 1)

    def axes(self, x: Axis, y: Axis) -> list[str]:
        bottom, right = self.y(0), WIDTH - RIGHT
        parts = []
        for value in ticks(self.most[1], y.base):
            at = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{escape(y.text(int(value)))}</text>')
        for value in ticks(self.most[0], x.base):
            at = self.x(value)
            parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{self.top}" y2="{bottom}"/>')
            parts.append(f'<text x="{at}" y="{bottom + 18}" text-anchor="middle">{escape(x.text(int(value)))}</text>')
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        middle = (LEFT + right) / 2
        parts.append(
            f'<text class="title" x="{middle}" y="{self.height - 10}" text-anchor="middle">{escape(x.title)}</text>'
        )
        turned = f'transform="translate(16 {(self.top + bottom) / 2}) rotate(-90)"'
        parts.append(f'<text class="title" {turned} text-anchor="middle">{escape(y.title)}</text>')
        return parts


def ticks(most: float, base: int) -> list[float]:
    """Round numbers from zero up, for the ticks of an axis."""
    unit = 1
    while most >= unit * base:
        unit *= base
    rough, step = most / unit / TICKS, 0.0
    power = 1.0
    while power > rough:
        power /= 10
    for factor in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
        if power * factor >= rough:
            step = power * factor
            break
    if unit == 1:
        step = max(step, 1.0)
    return [i * step * unit for i in range(int(most / unit / step + 1e-9) + 1)]


def scatter(
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    front: Sequence[Point] = (),
    legend: Sequence[str] = (),
    title: str = "",
) -> str:
    """Points, with a dashed line through those of the ``front``."""
    most = max((p.x for p in points), default=1), max((p.y for p in points), default=1)
    heading = title.splitlines()
    top = TOP + 17 * len(heading)
    frame = _Frame(400 + 17 * len(heading), (most[0] * 1.12, most[1] * 1.12), top)
    parts = frame.axes(x, y)
    parts += [f'<text x="{LEFT}" y="{TOP + 4 + 17 * i}">{escape(line)}</text>' for i, line in enumerate(heading)]
    line = sorted((frame.x(p.x), frame.y(p.y)) for p in front)
    if len(line) > 1:
        steps = "".join(f" H{a} V{b}" for a, b in line[1:])
        parts.append(f'<path class="front" d="M{line[0][0]} {line[0][1]}{steps}"/>')
    taken = [(frame.x(p.x) - 6, frame.y(p.y) - 6, frame.x(p.x) + 6, frame.y(p.y) + 6) for p in points]
    for p in points:
        parts.append(
            f"<g>{_marker(frame.x(p.x), frame.y(p.y), p.series)}<title>{escape(p.hint or p.label)}</title></g>"
        )
    labels: dict[tuple[float, float], list[str]] = {}
    for p in points:
        x_at, y_at = frame.x(p.x), frame.y(p.y)
        near = next((at for at in labels if abs(at[0] - x_at) + abs(at[1] - y_at) < 4), (x_at, y_at))
        labels.setdefault(near, []).append(p.label)
    for place, names in labels.items():
        parts.append(_label(", ".join(dict.fromkeys(filter(None, names))), *place, taken))
    return _svg(parts + _legend(legend, top), frame.height)


def lines(curves: Sequence[Curve], x: Axis, y: Axis) -> str:
    """Curves over the same axis, with a legend."""
    longest = max((len(curve.values) for curve in curves), default=1)
    frame = _Frame(360, (longest, max((max(c.values, default=0) for c in curves), default=1) * 1.08))
    parts = frame.axes(x, y)
    for curve in curves:
        colour = COLOURS[curve.series % len(COLOURS)]
        path = " ".join(f"{frame.x(i)} {frame.y(value)}" for i, value in _thinned(curve.values))
        title = f"<title>{escape(curve.label)}</title>"
        parts.append(f'<g><polyline class="line" stroke="{colour}" points="{path}"/>{title}</g>')
        if curve.marked is not None and 0 < curve.marked <= len(curve.values):
            at = frame.x(curve.marked - 1), frame.y(curve.values[curve.marked - 1])
            parts.append(f'<circle cx="{at[0]}" cy="{at[1]}" r="4" fill="{colour}" stroke="#fff"/>')
    return _svg(parts, frame.height)


def _thinned(values: Sequence[float], most: int = 500) -> list[tuple[int, float]]:
    """A shorter line: the largest number of each part."""
    size = -(-len(values) // most) or 1
    parts = [(start, values[start : start + size]) for start in range(0, len(values), size)]
    return [(start + list(part).index(max(part)), max(part)) for start, part in parts]


def _marker(x: float, y: float, series: int) -> str:
    fill = f'fill="{COLOURS[series % len(COLOURS)]}" stroke="#fff"'
    if series % 4 == 1:
        return f'<circle cx="{x}" cy="{y}" r="5.5" {fill}/>'
    shapes = {
        0: f"{x - 5},{y - 5} {x + 5},{y - 5} {x + 5},{y + 5} {x - 5},{y + 5}",
        2: f"{x},{y - 7} {x + 6.5},{y + 5} {x - 6.5},{y + 5}",
        3: f"{x},{y - 7} {x + 7},{y} {x},{y + 7} {x - 7},{y}",
    }
    return f'<polygon points="{shapes[series % 4]}" {fill}/>'


def _label(text: str, x: float, y: float, taken: list[tuple[float, float, float, float]]) -> str:
    """The label of a point, on the first side where it covers nothing else."""
    width, height = 6.4 * len(text), 13
    sides = [
        (8, -8, "start"), (10, 4, "start"), (-10, 4, "end"), (8, 18, "start"),
        (0, -11, "middle"), (0, 20, "middle"), (-8, -8, "end"), (-8, 18, "end"),
        *((8, 4 + 15 * n, "start") for n in (2, -2, 3, -3)),
    ]  # fmt: skip
    placed: list[tuple] = []
    for dx, dy, anchor in sides:
        left = x + dx - {"start": 0, "middle": width / 2, "end": width}[anchor]
        box = left, y + dy - height, left + width, y + dy + 3
        covered = sum(_overlap(box, other) for other in taken)
        outside = max(0, LEFT - box[0]) + max(0, box[2] - WIDTH) + max(0, -box[1])
        placed.append((covered + 100 * outside, len(placed), box, anchor, dx, dy))
    _, _, box, anchor, dx, dy = min(placed)
    taken.append(box)
    place = f'x="{round(x + dx, 1)}" y="{round(y + dy, 1)}" text-anchor="{anchor}"'
    return f'<text class="halo" {place}>{escape(text)}</text>'


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _legend(names: Sequence[str], top: int) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        y = top + 14 + 20 * i
        parts.append(_marker(WIDTH - RIGHT - 130, y - 4, i))
        parts.append(f'<text x="{WIDTH - RIGHT - 116}" y="{y}">{escape(name)}</text>')
    return parts


def _svg(parts: Sequence[str], height: int) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="remat-chart" role="img" {size}>'
    return "\n".join([head, *parts, "</svg>"])


def standalone(svg: str) -> str:
    """A chart as a separate file."""
    first, _, rest = svg.partition("\n")
    return f"{first}\n<style>{STYLE}</style>\n{rest}\n"

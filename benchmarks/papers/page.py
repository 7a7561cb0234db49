"""A row of the page of ``make papers``: what a table or figure of a paper says, and what comes out here. And curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Curve", "Part", "Row", "as_markdown", "print_rows", "svg_of"]


@dataclass(frozen=True)
class Row:
    what: str
    expected: str
    """As the paper prints it, or as an outside simulation of its rules says (EXACT in the row)."""
    got: str
    where: str = ""
    """The paper's table or figure."""


@dataclass(frozen=True)
class Curve:
    """Of a figure: ``(x, y)`` points by name; names that end with "paper" are the paper's own points."""

    name: str
    """Of its file, without the ending."""
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Part:
    """What one command gives."""

    paper: str
    command: str
    rows: Sequence[Row]
    curves: Sequence[Curve] = field(default_factory=tuple)


def print_rows(title: str, rows: Iterable[Row]) -> None:
    print(f"\n{title}\n{'':62} {'expected':>12} {'got':>12}")
    for row in rows:
        print(f"{row.what:62} {row.expected:>12} {row.got:>12}", flush=True)


def as_markdown(part: Part, about: str = "") -> str:
    """:param about: when, of what and where it was made."""
    lines = [
        f"`{part.command}`" + f" ({about})" * bool(about),
        "",
        "| table or figure | what it shows | expected | got |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {row.where} | {row.what} | {row.expected} | {row.got} |" for row in part.rows]
    for curve in part.curves:
        lines += ["", f"![{curve.y} by {curve.x}](papers/{curve.name}.svg)"]
    return "\n".join(lines)


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460, 240, 60, 14, 46
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


def svg_of(curve: Curve) -> str:
    """Lines of ours, and the paper's points as circles, on axes from zero, each in a colour of its own."""
    if len(curve.lines) > len(_COLOURS):
        raise ValueError(f"{curve.name} has {len(curve.lines)} lines, and there are {len(_COLOURS)} colours")
    points = [point for line in curve.lines.values() for point in line]
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points) * 1.05
    wide, high = _WIDTH - _LEFT - 130, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return _LEFT + wide * x / most_x, _TOP + high * (1 - y / most_y)

    bottom = _TOP + high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + wide}" fill="none" stroke="black"/>',
        f'<text x="{_LEFT + wide / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{curve.x}</text>',
        f'<text transform="translate(12 {_TOP + high / 2}) rotate(-90)" text-anchor="middle">{curve.y}</text>',
    ]
    for part in (0, 0.5, 1):
        x, y = at(most_x * part, most_y * part)
        parts.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{most_x * part:.4g}</text>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.0f}" text-anchor="end">{most_y * part:.3g}</text>')
    for number, (name, line) in enumerate(curve.lines.items()):
        colour, places = _COLOURS[number], [at(*point) for point in line]
        if name.endswith("paper"):
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{colour}"/>' for x, y in places]
        else:
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        label = _TOP + 12 + 16 * number
        parts.append(f'<text x="{_LEFT + wide + 8}" y="{label}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])

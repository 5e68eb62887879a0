# SPDX-License-Identifier: Apache-2.0
"""Lines in a picture, as SVG, which browsers show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#555555", "#1f77b4", "#d62728", "#2ca02c")
WIDTH, HEIGHT, MARGIN = 720, 400, 56


@dataclass(frozen=True, slots=True)
class Line:
    """Points `(x, y)` in the order of x, which is from 0 to 100."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def plot(lines: Sequence[Line], x: str, y: str, low: float, high: float = 100.0) -> str:
    """Draw lines from `low` to `high`; what is below stands on the edge."""

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = MARGIN + (WIDTH - 2 * MARGIN) * point[0] / 100
        up = (min(max(point[1], low), high) - low) / (high - low)
        return across, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * up

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">']
    parts.append(
        '<g font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    )
    for number in range(5):
        value = low + (high - low) * number / 4
        (left, height), (right, _) = at((0, value)), at((100, value))
        parts.append(f'<path d="M{left:.1f} {height:.1f}H{right:.1f}" stroke="#dddddd"/>')
        parts.append(
            f'<text x="{left - 6:.1f}" y="{height + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
        across, bottom = at((25 * number, low))
        label = f"{25 * number}"
        parts.append(
            f'<text x="{across:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{label}</text>'
        )
    for number, line in enumerate(lines):
        colour, dash = (
            COLOURS[number % len(COLOURS)],
            ' stroke-dasharray="6 4"' if line.dashed else "",
        )
        path = " ".join(f"{across:.1f},{up:.1f}" for across, up in map(at, line.points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
        )
        place = HEIGHT - MARGIN - 18 * (len(lines) - number)
        text = f'x="{WIDTH - MARGIN - 8}" y="{place}" text-anchor="end" fill="{colour}"'
        parts.append(f"<text {text}>{escape(line.name)}</text>")
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x)}</text>')
    turned = f'x="16" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {HEIGHT / 2})"'
    parts.append(f"<text {turned}>{escape(y)}</text></g></svg>")
    return "\n".join(parts) + "\n"

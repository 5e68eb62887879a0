# SPDX-License-Identifier: Apache-2.0
"""Write docs/compares.md: speed, accuracy and features next to peers, from results of benchmarks.

python -m docs.generate_compares
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from qompose.console import Block, Table, as_markdown

from docs.comparison.features import FEATURES, MARKS, PEERS, Feature
from docs.comparison.measured import (
    AHEAD,
    BEHIND,
    EVEN,
    FLOAT,
    OURS,
    Result,
    duels,
    results,
    verdict,
)

FOLDER = Path(__file__).parent
PAGE = FOLDER / "compares.md"
RESULTS = FOLDER.parent / "benchmarks" / "results"
ECOSYSTEM = RESULTS / "ecosystem.md"

INTRODUCTION = """# How qompose compares

Written by `docs/generate_compares.py` from [benchmark results](../benchmarks/README.md) and a list of
features. All times are in the linked pages, with commands, versions and dates. Times are medians of one
call; an engine is ahead or behind only if the ranges from the 10th to the 90th percentile do not overlap.
Of a product with several engines, the fastest one counts."""


def page() -> str:
    """Return the page as Markdown."""
    found = results(RESULTS)
    blocks: list[Block] = [
        *INTRODUCTION.splitlines(),
        "",
        "## Speed",
        _tally(found),
        "## Accuracy",
        "",
        " and ".join(f"[{Path(name).stem}](../benchmarks/results/{name})" for name in ACCURACY)
        + " have the SQNR and the task's own measure on data that no engine was calibrated on.",
        "",
        "## Coverage",
        "",
        *_ecosystem(ECOSYSTEM.read_text("utf-8")),
        "## Features",
        "",
        *_features(),
    ]
    return as_markdown(blocks).rstrip("\n") + "\n"


def _slower(result: Result, product: str) -> str:
    """Return the models on which a product is ahead of us, with our time as a multiple of its."""
    return ", ".join(
        f"{model} {ours.median / theirs.median:.2f}"
        for model, _, ours, theirs in duels(result, [product])
        if verdict(ours, theirs) == BEHIND
    )


def _link(result: Result) -> str:
    return f"[{result.title}](../benchmarks/results/{result.name}.md)"


ACCURACY = ("accuracy.md", "sentence_encoder.md")
"""The pages with the SQNR of each engine on each task."""


def _tally(found: list[Result]) -> Table:
    """Return on how many models we are ahead of each peer and of float, even, or behind, and where."""
    rows = []
    for result in found:
        for number, product in enumerate((*result.products(), FLOAT)):
            won = Counter(verdict(*pair) for _, _, *pair in duels(result, [product]))
            counts = f"{won[AHEAD]} / {won[EVEN]} / {won[BEHIND]}"
            rows.append(
                ("" if number else _link(result), product, counts, _slower(result, product))
            )
    return Table(
        ("result", "peer", "ahead / even / behind", "behind on, our time over its"), tuple(rows)
    )


def _ecosystem(text: str) -> Iterator[Block]:
    """Yield what the table of other packages' quantizers comes to."""
    lines = text[text.index("## Quantizer by model") :].split("\n## ")[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    header, body = rows[0], rows[2:]
    columns = {
        engine: [i for i, title in enumerate(header) if title.endswith(f", {engine}")]
        for engine in ("torchao", "qompose")
    }
    counts = {
        engine: Counter(_state(row[i]) for row in body for i in places)
        for engine, places in columns.items()
    }
    alike = sum(
        row[i] == row[j]
        for row in body
        for i, j in zip(columns["torchao"], columns["qompose"], strict=True)
    )
    total = sum(counts["qompose"].values())
    yield (
        f"{len(body)} quantizers of torchao and ExecuTorch, unmodified, on "
        f"{len(columns['qompose'])} models: on {alike} of {total}"
        " torchao's engine and ours give the same operators and the same error, and "
        f"{counts['torchao']['fails']} fail in torchao's, {counts['qompose']['fails']} in ours "
        "([each with a reason](../benchmarks/results/ecosystem.md)). "
        "How many models of a zoo go through each flow: [zoo](../benchmarks/results/zoo.md)."
    )
    yield ""


def _state(cell: str) -> str:
    if "no-op" in cell:
        return "no-op"
    return "fails" if cell.startswith("fails") else "quantized"


def _features() -> Iterator[Block]:
    read = "; ".join(f"{name} ({what})" for name, what in PEERS.items())
    yield (
        f"What peers have was read in their code and documentation, and in part run: {read}. "
        "(+2): two more have it in one of several backends or formats, or with a gap."
    )
    rows = [
        (each.name, _ours(each), _havers(each)) for group in FEATURES.values() for each in group
    ]
    yield Table(("feature", OURS, "peers"), tuple(rows))


def _ours(feature: Feature) -> str:
    return MARKS[feature.ours] + (
        f": {feature.note}" if feature.ours != "Y" and feature.note else ""
    )


def _havers(feature: Feature) -> str:
    """Return the peers that have a feature, and in parentheses how many have it in part."""
    marks = feature.peers.split()
    whole = ", ".join(peer for peer, mark in zip(PEERS, marks, strict=True) if mark == "Y")
    return f"{whole} (+{marks.count('P')})" if "P" in marks else whole


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

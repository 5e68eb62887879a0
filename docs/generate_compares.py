# SPDX-License-Identifier: Apache-2.0
"""Write docs/compares.md: times and features beside peers, from measured results and tests that exist.

python -m docs.generate_compares
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from qompose.console import Block, Table, as_markdown

from docs.building.features import FEATURES, MARKS, PEERS, Feature
from docs.building.measured import (
    AHEAD,
    BEHIND,
    EVEN,
    FLOAT,
    LIKE,
    OURS,
    Result,
    Shares,
    Time,
    duels,
    results,
    shares,
    verdict,
)

FOLDER = Path(__file__).parent
PAGE = FOLDER / "compares.md"
RESULTS = FOLDER.parent / "benchmarks" / "results"
ECOSYSTEM = FOLDER / "ecosystem.md"

INTRODUCTION = """# How qompose compares

Written by `docs/generate_compares.py` from [results of benchmarks](../benchmarks/README.md), from the table
of [other packages' quantizers](ecosystem.md), and from a list of features in which each of ours names the
tests that show it.

Times are medians of one call. An engine counts as ahead or behind only where the ranges from the tenth to
the ninetieth percentile do not touch, and as even otherwise. Where a product has several engines, the
fastest one counts."""


def page() -> str:
    """Return the page as Markdown."""
    found = results(RESULTS)
    blocks: list[Block] = [
        *INTRODUCTION.splitlines(),
        "",
        "## Where peers are ahead",
        "",
        *_shortfalls(found),
        "## Times, beside each peer",
        _tally(found),
        *(block for result in found for block in _times(result)),
        *(block for table in shares(RESULTS) for block in _shares(table)),
        *_accuracy(),
        "## Quantizers of other packages",
        "",
        *_ecosystem(ECOSYSTEM.read_text("utf-8")),
        "## Features",
        "",
        *_features(),
    ]
    return as_markdown(blocks).rstrip("\n") + "\n"


def _shortfalls(found: list[Result]) -> Iterator[Block]:
    """Yield all in which a peer is better: times, then features."""
    yield "Slower than a peer, with our time as a multiple of its:"
    yield _faster(found, lambda result: result.products(), "faster peers")
    yield (
        "Slower than float, in its fastest form; a model that is calibrated is a float model with observers, "
        "and most of them only cost time:"
    )
    yield _faster(found, lambda _: [FLOAT], "float")
    yield "Not there, or only in part, while peers have it:"
    lacking = [
        (each.name, MARKS[each.ours], ", ".join(_havers(each)), each.note)
        for group in FEATURES.values()
        for each in group
        if each.ours != "Y"
    ]
    yield Table(("feature", "qompose", "peers that have it", ""), tuple(lacking))


def _faster(found: list[Result], products: Callable[[Result], list[str]], title: str) -> Table:
    """Return a table of models on which some products are ahead of us, and by how much."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in found:
        for model, product, ours, theirs in duels(result, products(result)):
            if verdict(ours, theirs) == BEHIND:
                cell = f"{product} ({_ratio(ours, theirs)})"
                rows.setdefault((_link(result), model), []).append(cell)
    return Table(("result", "model", title), tuple((*key, ", ".join(c)) for key, c in rows.items()))


def _ratio(ours: Time, theirs: Time) -> str:
    ratio = ours.median / theirs.median
    return f"{ratio:.2f}" if ratio >= 0.01 else "below 0.01"


def _havers(feature: Feature) -> list[str]:
    marks = zip(PEERS, feature.peers.split(), strict=True)
    return [peer for peer, mark in marks if mark == "Y"]


def _link(result: Result) -> str:
    return f"[{result.title}](../benchmarks/results/{result.name}.md)"


ENGINES = ("x86", "xnnpack", "torchao x86", "torchao xnnpack", "nncf", "onnxruntime")
"""The columns of the table of accuracy: as they come."""
ACCURACY = ("accuracy.md", "sentence_encoder.md")
"""Its pages."""
BATCHES = "8"
"""Of calibration; the pages have figures of others, too."""


def _accuracy() -> Iterator[Block]:
    """Yield the signal over noise of each engine on each task, from the pages of the bench."""
    paths = [RESULTS / name for name in ACCURACY]
    found: dict[str, dict[str, str]] = {}
    for part in (part for path in paths for part in path.read_text("utf-8").split("\n## ")[1:]):
        task, *lines = part.splitlines()
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]
        place = next((row.index("SQNR, dB") for row in cells if "SQNR, dB" in row), None)
        rows = [r for r in cells if place is not None and r[0] in ENGINES and r[1] == BATCHES]
        found[task] = {row[0]: row[place] for row in rows if place is not None}
    yield from ("", "## Accuracy on data that nobody calibrated on", "")
    models = f"Q/DQ models calibrated with {BATCHES} batches"
    yield f"Signal over noise in decibels, of {models}, each engine as it comes."
    pages = " and ".join(f"[{path.stem}](../benchmarks/results/{path.name})" for path in paths)
    yield f"The pages {pages} have the tasks, their data, when they were measured, and more metrics."
    yield ""
    kept = {task: row for task, row in found.items() if row}
    yield Table(
        ("task", *ENGINES),
        tuple((task, *(row.get(name, "") for name in ENGINES)) for task, row in kept.items()),
    )


def _tally(found: list[Result]) -> Table:
    """Return on how many models we are ahead of each peer, even, or behind."""
    rows = []
    for result in found:
        counts: dict[str, Counter[str]] = {product: Counter() for product in result.products()}
        for _, product, ours, theirs in duels(result, result.products()):
            counts[product][verdict(ours, theirs)] += 1
        rows += [
            (_link(result), product, *(str(each[kind]) for kind in (AHEAD, EVEN, BEHIND)))
            for product, each in counts.items()
        ]
    return Table(("result", "peer", "models: ahead", "even", "behind"), tuple(rows))


def _times(result: Result) -> Iterator[Block]:
    """Yield a table of one result, with a column for each product."""
    products = result.products()
    rows = []
    for model in result.times:
        cells = [_cell(result, model, product) for product in (FLOAT, *products, OURS)]
        ours, theirs = result.best(model, (OURS,)), result.best(model, products)
        beside = ""
        if ours is not None and theirs is not None:
            beside = f"{_ratio(ours, theirs)}, {verdict(ours, theirs)}"
        rows.append((model, *cells, beside))
    yield f"### {result.title}"
    yield ""
    whole = f"[The whole table](../benchmarks/results/{result.name}.md)."
    yield f"{result.conditions}. {_likeness(result)}{whole}"
    header = ("model", f"float, {result.unit}", *products, OURS, "of the fastest peer")
    yield Table(header, tuple(rows))


def _shares(table: Shares) -> Iterator[Block]:
    """Yield a table of how many models go through each flow, as it was measured."""
    yield f"## {table.title}"
    yield ""
    page = f"[The page](../benchmarks/results/{table.name}.md)"
    yield f"{page} says how this was measured, and what is missing."
    yield Table(table.header, table.rows)


def _likeness(result: Result) -> str:
    chosen = next((names for start, names in LIKE.items() if result.name.startswith(start)), ())
    return f"Of ours, what does the same counts: {', '.join(chosen)}. " if chosen else ""


def _cell(result: Result, model: str, product: str) -> str:
    found: Time | None = result.best(model, (product,))
    if found is None:
        return "fails" if product in result.failed.get(model, ()) else ""
    return f"{found.median:,.3f}" if found.median < 1 else f"{found.median:,.1f}"


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
        f"{len(body)} quantizers and configurations of torchao and ExecuTorch, unmodified, on "
        f"{len(columns['qompose'])} models, under torchao's engine and ours. On {alike} of {total} both give "
        "the same operators and the same error; [the page](ecosystem.md) has a reason for each other one."
    )
    yield Table(
        ("engine", "quantized", "nothing quantized", "fails"),
        tuple(
            (engine, *(str(each[kind]) for kind in ("quantized", "no-op", "fails")))
            for engine, each in counts.items()
        ),
    )


def _state(cell: str) -> str:
    if "no-op" in cell:
        return "no-op"
    return "fails" if cell.startswith("fails") else "quantized"


def _features() -> Iterator[Block]:
    yield (
        "What peers have was read in their code and documentation, and in part run. "
        '"part" is a feature of one backend or format among several, or one with a gap; '
        '"?" was not looked at.'
    )
    yield Table(("peer", "what was read"), tuple(PEERS.items()))
    for title, group in FEATURES.items():
        yield f"### {title}"
        yield Table(
            ("feature", OURS, *PEERS, "shown by"),
            tuple(
                (
                    each.name,
                    MARKS[each.ours],
                    *(MARKS[mark] for mark in each.peers.split()),
                    _shown(each),
                )
                for each in group
            ),
        )
        notes = [f"{each.name}: {each.note}." for each in group if each.note]
        yield from (f"- {note}" for note in notes)
        if notes:
            yield ""


def _shown(feature: Feature) -> str:
    file = feature.test
    return f"[{file.removesuffix('.py')}](../tests/{file})" if file else ""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

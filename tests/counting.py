# SPDX-License-Identifier: Apache-2.0
"""Counts of a graph made without qompose's own counting, and what a report must say because of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import qompose
from qompose.reporting.report_data import FLOAT, KERNEL, OBSERVED, SIMULATED
from torch.fx import GraphModule, Node

from tests.zoo import ZOO, ZooModel


def first_of_every_tag(without: str = "transformers") -> list[ZooModel]:
    """The first model of the zoo for each of its tags, so that every kind of program is there."""
    models = [model for model in ZOO if without not in model.tags]
    tags = sorted({tag for model in models for tag in model.tags})
    names = {next(m.name for m in models if tag in m.tags) for tag in tags}
    return [model for model in models if model.name in names]


def nodes(model: GraphModule) -> Iterator[Node]:
    """The nodes of a program and of all graphs that it reads as attributes."""
    for node in model.graph.nodes:
        yield node
        if node.op == "get_attr":
            found: Any = model
            for part in str(node.target).split("."):
                found = getattr(found, part)
            if isinstance(found, GraphModule):
                yield from nodes(found)


def calls(model: GraphModule, *prefixes: str) -> list[Node]:
    return [
        n for n in nodes(model) if n.op == "call_function" and str(n.target).startswith(prefixes)
    ]


QUANTIZE = ("quantized_decomposed.quantize_", "qompose.quantize_")
DEQUANTIZE = ("quantized_decomposed.dequantize_", "qompose.dequantize_")


def independent_counts(model: GraphModule) -> dict[str, int]:
    """What `report.counts` must be, but for casts and kernels."""
    return {
        "observers": sum(
            n.op == "call_module" and not str(n.target).startswith("sums_") for n in nodes(model)
        ),
        "quantize": len(calls(model, *QUANTIZE)),
        "dequantize": len(calls(model, *DEQUANTIZE)),
        "choose_qparams": len(calls(model, "quantized_decomposed.choose_qparams")),
    }


def requantized(model: GraphModule) -> list[Node]:
    """Quantize operators right behind a dequantize operator, a change of float type between them or not."""
    found = []
    for node in calls(model, *QUANTIZE):
        source = node.args[0]
        while isinstance(source, Node) and str(source.target) == "aten.to.dtype":
            source = source.args[0]
        if isinstance(source, Node) and str(source.target).startswith(DEQUANTIZE):
            found.append(node)
    return found


def check(model: GraphModule, *, requantizations: bool = True) -> qompose.Report:
    """Assert that the report of a graph module says of it what the graph shows, and return it."""
    report, record = qompose.report(model), model.meta["qompose"]
    counts = report.counts.__dict__
    assert {name: counts[name] for name in independent_counts(model)} == independent_counts(model)
    rows: dict[str, set[int]] = {}
    for row, operator in zip(report.rows, record.plan.operators, strict=True):
        rows.setdefault(row.state, set()).add(operator.claim)
    _check_observers(report, record)
    _check_kernels(model, report, rows.get(KERNEL, set()))
    names = {node.name: node for node in nodes(model)}
    for number in rows.get(SIMULATED, set()) - {None}:
        region = [names[name] for name in record.plan.claims[number].nodes]
        assert any(map(_touches_quantized, region)), record.plan.claims[number]
    assert len(record.plan.requantizations(record.dropped)) == len(report.requantizations)
    if requantizations and report.stage in ("converted", "lowered"):
        assert len(requantized(model)) == len(report.requantizations)
    dropped = set(record.dropped)
    assert all(n is None or n in dropped for n in rows.get(FLOAT, set()))
    return report


def _check_observers(report: qompose.Report, record: Any) -> None:
    """There is one for each tensor and group of parameters, while the model is a prepared one."""
    pairs = {(p.source, n) for n, group in enumerate(record.plan.groups) for p in group.points}
    assert report.counts.observers == (len(pairs) if report.stage == "prepared" else 0)
    assert (OBSERVED in {row.state for row in report.rows}) <= bool(pairs)


def _check_kernels(model: GraphModule, report: qompose.Report, lowered: set[int]) -> None:
    """Of regions that kernels replaced no operator is left, and the graph says which they are."""
    record = model.meta["qompose"]
    tagged = [
        claim
        for node in nodes(model)
        for claim in node.meta.get("custom", {}).get("qompose", {}).get("kernels", ())
    ]
    replaced = set(record.kernels) if report.stage == "lowered" else set()
    assert len(tagged) == len(set(tagged)) == report.counts.kernels
    assert set(tagged) == replaced
    assert lowered <= replaced
    names = {node.name for node in nodes(model)}
    for number in replaced:
        assert names.isdisjoint(record.plan.claims[number].nodes)


def _touches_quantized(node: Node) -> bool:
    around = [*node.all_input_nodes, *node.users]
    marks = (*QUANTIZE, *DEQUANTIZE, "quantized_decomposed.choose_qparams", "aten.to.", "aten.mul.")
    return any(str(other.target).startswith(marks) for other in around)

# SPDX-License-Identifier: Apache-2.0
"""The graph of a page: its edges are the rows' inputs, at every depth of modules, coloured with words."""

from __future__ import annotations

from typing import Any

from qompose.reporting.graph_drawing import DASHED, DOTTED, FULL, graph_of, measured_rows
from qompose.reporting.report_data import STATES, Comparison, Report, Row

from tests.core.diagnosis.reports import comparison, in_float, report, row

BORDERS = dict(zip(STATES, (FULL, FULL, FULL, DASHED, DASHED, DOTTED), strict=True))


def graph(*rows: Row, compared: Comparison | None = None) -> dict[str, Any]:
    made: Report = report(*rows)
    entries = measured_rows(made.to_dict(), compared.to_dict() if compared else None)
    return graph_of(entries, BORDERS)


def edges(level: dict[str, Any]) -> set[tuple[str, str]]:
    labels = [node["label"] for node in level["nodes"]]
    return {(labels[one], labels[other]) for one, other in level["edges"]}


def test_all_operators_with_their_edges() -> None:
    level = graph()["levels"][-1]
    assert level["title"] == "all operators"
    assert edges(level) == {
        ("first", "second"), ("second", "third"), ("first", "sum"), ("third", "sum"),
        ("sum", "last"),
    }  # fmt: skip
    assert [node["at"][0] for node in level["nodes"]] == [0, 1, 2, 3, 4]
    assert [node["rows"] for node in level["nodes"]] == [[i, i + 1] for i in range(5)]


def test_modules_as_one() -> None:
    first, second, *_ = graph()["levels"]
    assert (first["title"], second["title"]) == ("modules, 1 deep", "modules, 2 deep")
    assert [(n["label"], n["kind"]) for n in first["nodes"]] == [
        ("body", "4 operators"), ("last", "aten.tanh"),
    ]  # fmt: skip
    assert edges(first) == {("body", "last")}
    assert edges(second) == {("body.0", "body.1"), ("body.1", "last")}


def test_a_module_that_is_called_twice_stands_twice() -> None:
    rows = (
        row("a", module="m"),
        row("b", "a", module="m"),
        row("c", "b"),
        row("d", "c", module="m"),
    )
    level = graph(*rows)["levels"][0]
    assert [node["rows"] for node in level["nodes"]] == [[0, 2], [2, 3], [3, 4]]
    assert level["edges"] == [(0, 1), (1, 2)]


def test_the_finest_level_with_few_boxes_is_shown_first() -> None:
    many = [row(f"r{i}", module=f"m{i // 40}.{i}") for i in range(200)]
    found = graph(*many)
    assert [len(level["nodes"]) for level in found["levels"]] == [5, 200]
    assert found["first"] == 0
    assert graph()["first"] == 3


def test_levels_without_a_difference_are_left_out() -> None:
    rows = (row("a", module="x.y.z"), row("b", module="x.y.z"), row("c", module="x.y.w"))
    assert [level["title"] for level in graph(*rows)["levels"]] == [
        "modules, 3 deep",
        "all operators",
    ]


def test_looks_of_one_and_of_several() -> None:
    level, finest = (graph(compared=comparison())["levels"][i] for i in (1, -1))
    looks = {node["label"]: node["looks"] for node in (*level["nodes"], *finest["nodes"])}
    assert looks["first"] == {
        "owner": ["hue0", "one"], "state": ["hue0", "int8 kernel"],
        "sqnr": ["step0", "45.0 dB"], "own": ["step0", "45.0 dB"],
    }  # fmt: skip
    assert looks["second"]["owner"] == ["hue1", "two"]
    assert looks["second"]["sqnr"] == ["step0", "equal"]
    assert looks["third"]["sqnr"] == ["step2", "21.5 dB"]  # of two values, the first
    assert looks["last"]["owner"] == ["none", "nobody"]
    assert looks["last"]["sqnr"] == ["none", "not compared"]
    assert looks["body.0"]["owner"] == ["hue0", "2 owners"]
    assert looks["body.1"]["sqnr"] == ["step2", "21.5 dB"]  # the worst of those inside
    borders = {node["label"]: node["border"] for node in finest["nodes"]}
    assert (borders["first"], borders["third"], borders["last"]) == ("full", "dashed", "dotted")


def test_several_look_like_those_that_do_most_of_the_work() -> None:
    rows = (
        row("a", module="m", macs=5), in_float("b", "a", module="m", macs=90),
        row("c", "b", module="m", macs=5), row("d", "c", module="n"),
    )  # fmt: skip
    node = graph(*rows)["levels"][0]["nodes"][0]
    assert node["looks"]["owner"] == ["none", "2 owners"]
    assert node["looks"]["state"] == ["none", "2 states"]
    assert node["border"] == "dotted"


def test_strange_inputs_do_no_harm() -> None:
    """Of data that was written by hand: unknown names, circles, operators that read themselves."""
    rows = (row("a", "b", "nowhere"), row("b", "a"), row("c", "c"), in_float("d", "a", "a"))
    level = graph(*rows)["levels"][-1]
    assert edges(level) == {("a", "b"), ("b", "a"), ("a", "d")}


def test_no_operators() -> None:
    data = {**report().to_dict(), "rows": []}
    found = graph_of(measured_rows(data, None), BORDERS)
    assert [level["nodes"] for level in found["levels"]] == [[]]

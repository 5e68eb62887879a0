# SPDX-License-Identifier: Apache-2.0
"""The page of a report says what the report says, as text, needs no network, and no name can become code."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
from qompose.plan.plan import Requantized
from qompose.reporting import html_page as module, report_data
from qompose.reporting.report_data import Comparison, Report

from tests.core.diagnosis.parsed import Element, parsed
from tests.core.diagnosis.reports import EVIL, ROWS, compared, comparison, in_float, report, row


def text_of(made: Report, against: Comparison | None = None) -> str:
    return made._page(against)


def page_of(made: Report, against: Comparison | None = None) -> Element:
    return parsed(text_of(made, against))


def section(root: Element, name: str) -> Element:
    (found,) = (e for e in root.all("section") if e.attributes["id"] == name)
    return found


def cells(table: Element) -> list[list[str]]:
    return [
        [cell.text for cell in line.all() if cell.name in ("td", "th")] for line in table.all("tr")
    ]


def data_of(root: Element) -> Any:
    return json.loads(root.one("script", type="application/json").text)


class TestContent:
    """What stands where."""

    def test_totals(self) -> None:
        header = page_of(report()).one("header").text
        for words in (
            "3 operators in 3 int8 kernels, 1 simulated (Q/DQ), 1 in float",
            "1,000",
            "30.0%",
        ):
            assert words in header

    def test_coverage_by_owner_and_state(self) -> None:
        rows = cells(section(page_of(report()), "coverage"))
        assert rows == [
            ["owner and state", "multiply-accumulates", "operators"],
            ["one int8 kernel", "60.0% 600", "40.0% 2"],
            ["one simulated (Q/DQ)", "20.0% 200", "20.0% 1"],
            ["two int8 kernel", "10.0% 100", "20.0% 1"],
            ["nobody float", "10.0% 100", "20.0% 1"],
        ]

    def test_the_table_has_every_operator(self) -> None:
        table = page_of(report(), comparison()).one("table", id="operators")
        head, *rows = cells(table)
        assert head[0] == "operator"
        assert [line[0] for line in rows] == [entry.name for entry in ROWS]
        assert rows[2] == [
            "third", "aten.linear", "body.1", "simulated (Q/DQ)", "one", "21.5 dB", "24.2 dB",
            "clipping", "no kernel", "200", "linear", "static",
        ]  # fmt: skip
        assert rows[4][3:5] == ["float", "nobody"]
        values = [
            e.attributes["data-value"] for e in table.all("td") if "data-value" in e.attributes
        ]
        assert values == [
            "45.0", "45.0", "600", "Infinity", "Infinity", "100", "21.5", "24.25", "200", "0", "100",
        ]  # fmt: skip

    def test_states_and_owners_to_choose_from(self) -> None:
        root = page_of(report())
        for name, wanted in (
            ("state", ["", "int8 kernel", "simulated (Q/DQ)", "float"]),
            ("owner", ["", "one", "two", "nobody"]),
        ):
            options = root.one("select", id=name).all("option")
            assert [option.attributes["value"] for option in options] == wanted

    def test_remarks(self) -> None:
        meeting = Requantized("sum", "one", "int8", "two", "uint8", ("last",))
        root = page_of(
            report(
                requantizations=(meeting,), conflicts=("a lost",), rewrites=("folded",),
                notes=tuple(f"note {i}" for i in range(30)),
            )
        )  # fmt: skip
        found = section(root, "remarks")
        summaries = {d.one("summary").text: "open" in d.attributes for d in found.all("details")}
        assert summaries == {
            "Requantizations (1)": True, "Conflicts (1)": True, "Rewrites (1)": True,
            "Notes (30)": False,
        }  # fmt: skip
        assert [line.text for line in found.all("li")][:3] == [str(meeting), "a lost", "folded"]
        assert "None." in section(page_of(report()), "remarks").text

    def test_the_data_of_both(self) -> None:
        data = data_of(page_of(report(), comparison()))
        assert data["report"] == report().to_dict()
        assert data["comparison"] == comparison().to_dict()
        assert data_of(page_of(report()))["comparison"] is None


class TestErrors:
    """The section of errors, with a comparison and without."""

    def test_without_one_it_says_how_to_get_one(self) -> None:
        root = page_of(report())
        assert "qompose.compare" in section(root, "errors").text
        (head, *_) = cells(root.one("table", id="operators"))
        assert "SQNR" not in head
        modes = [o.attributes["value"] for o in root.one("select", id="mode").all("option")]
        assert modes == ["owner", "state"]

    def test_marks_are_at_their_depth_and_height(self) -> None:
        plot = section(page_of(report(), comparison()), "errors").one("svg", class_="plot")
        marks = {
            (m.attributes["data-row"], m.attributes["class"]): m
            for m in plot.all()
            if "data-row" in m.attributes
        }
        assert set(marks) == {(r, kind) for r in "012" for kind in ("own", "whole")}
        assert [marks[r, "whole"].attributes["cx"] for r in "012"] == ["10.00%", "30.00%", "50.00%"]
        first, second, third = (int(marks[r, "whole"].attributes["cy"]) for r in "012")
        assert second < first < third, "the better, the higher"
        top, *_, bottom = sorted(int(line.attributes["y1"]) for line in plot.all("line"))
        assert second < top <= first, "what is equal has a line above all"
        assert third <= bottom <= int(plot.attributes["height"])
        assert marks["2", "own"].one("title").text == "third: own SQNR 24.2 dB, clipping"

    def test_what_adds_most_comes_in_the_order_of_the_comparison(self) -> None:
        found = section(page_of(report(), comparison()), "errors")
        most = cells(next(iter(found.all("table"))))
        assert most[1:] == [
            ["third", "body.1", "clipping", "24.2 dB", "21.5 dB"],
            ["first", "body.0.a", "rounding", "45.0 dB", "45.0 dB"],
            ["second", "body.0.b", "equal", "equal", "equal"],
        ]  # fmt: skip
        assert [a.attributes["href"] for a in found.all("a")] == ["#row2", "#row0", "#row1"]

    def test_nothing_is_silently_left_out(self) -> None:
        against = comparison(unpaired=("lost",), notes=("a note",))
        text = section(page_of(report(), against), "errors").text
        for words in (
            "3 of 5 operators",
            "only in one program: lost",
            "a note",
            "head.weight",
            "4 inputs",
        ):
            assert words in text

    def test_of_another_program(self) -> None:
        found = section(page_of(report(), comparison(compared("elsewhere", 3.0))), "errors")
        assert "0 of 5 operators compared" in found.text
        assert "value of elsewhere" in found.text
        assert not list(found.all("svg"))


class TestSafety:
    """Text of models and packages does no harm, and nothing is loaded."""

    EVERYWHERE = report(
        replace(
            row(EVIL, module=EVIL), operator=EVIL, rule=EVIL, config=EVIL, kernel=EVIL, selector=EVIL
        ),
        in_float("x", EVIL, reason=EVIL),
        row("y", owner=EVIL),
        conflicts=(EVIL,), rewrites=(EVIL,), notes=(EVIL,), target=EVIL,
    )  # fmt: skip
    AGAINST = comparison(
        compared(EVIL, 3.0, 2.0), compared("z", 3.0, value=EVIL, operator=EVIL),
        reference=EVIL, unpaired=(EVIL,), notes=(EVIL,),
    )  # fmt: skip

    def test_names_stay_text(self) -> None:
        evil, plain = (
            page_of(*both) for both in ((self.EVERYWHERE, self.AGAINST), (report(), comparison()))
        )
        assert len(list(evil.all("script"))) == len(list(plain.all("script"))) == 2
        assert {e.name for e in evil.all()} <= {e.name for e in plain.all()} | {"wbr"}
        assert data_of(evil)["report"] == self.EVERYWHERE.to_dict()
        assert evil.text.count(EVIL) >= 15

    def test_names_may_break_behind_their_parts(self) -> None:
        assert module.breakable("layer.0/conv_1.") == "layer.<wbr>0/<wbr>conv_<wbr>1."

    def test_no_handler_is_an_attribute(self) -> None:
        for element in page_of(self.EVERYWHERE, self.AGAINST).all():
            assert not [name for name in element.attributes if name.startswith("on")]

    def test_nothing_is_loaded(self) -> None:
        text = text_of(report(), comparison())
        root = parsed(text)
        assert not {"link", "img", "iframe", "object", "embed", "base"} & {
            e.name for e in root.all()
        }
        assert not [e for e in root.all() if "src" in e.attributes]
        targets = [e.attributes["href"] for e in root.all() if "href" in e.attributes]
        assert all(target.startswith("#") for target in targets)
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"']*", text))
        assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG's elements
        assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", text)

    def test_the_policy_lets_this_script_run_and_no_other(self) -> None:
        root = page_of(report())
        (policy,) = (
            e.attributes["content"] for e in root.all("meta")
            if e.attributes.get("http-equiv") == "Content-Security-Policy"
        )  # fmt: skip
        (script,) = (s.text for s in root.all("script") if "type" not in s.attributes)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'")

    def test_data_ends_no_element(self) -> None:
        text = text_of(self.EVERYWHERE, self.AGAINST)
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
        assert not {"<", ">", "&", "\u2028"} & {*data}

    def test_the_script_makes_no_markup_of_text(self) -> None:
        code = (Path(module.__file__).parent / "templates" / "page.js").read_text("utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", code)


class TestForm:
    """For all who read it."""

    def test_equal_reports_have_equal_pages(self) -> None:
        again = Report.from_dict(json.loads(report().to_json()))
        assert text_of(report(), comparison()) == text_of(again, comparison())

    def test_landmarks_names_and_labels(self) -> None:
        root = page_of(report(), comparison())
        assert root.one("html").attributes["lang"] == "en"
        for name in ("header", "nav", "main", "h1"):
            root.one(name)
        ids = {e.attributes["id"] for e in root.all() if "id" in e.attributes}
        for element in root.all():
            for key in ("aria-labelledby", "aria-describedby", "for"):
                assert set(element.attributes.get(key, "").split()) <= ids
        for table in root.all("table"):
            assert table.one("caption").text
            assert all(head.attributes["scope"] in ("col", "row") for head in table.all("th"))
        labelled = [e for label in root.all("label") for e in label.all()]
        fields = [e for e in root.all() if e.name in ("select", "input")]
        assert all(any(field is other for other in labelled) for field in fields)
        assert {a.attributes["href"][1:] for a in root.one("nav").all("a")} <= ids

    def test_no_operators(self) -> None:
        root = page_of(replace(report(), rows=()), comparison())
        assert "no float operators" in root.text
        assert len(cells(root.one("table", id="operators"))) == 1


def test_a_ratio_without_bound_has_a_line_of_its_own() -> None:
    """Below all that have a number: it is no 0 dB."""
    found = comparison(compared("first", 40.0, 40.0), compared("second", -math.inf, -math.inf))
    for against in (found, comparison(compared("second", -math.inf, -math.inf))):
        part = section(page_of(report(), against), "errors")
        axis = part.one("svg", class_="axis").all("text")
        ends = {text.text: int(text.attributes["y"]) - 4 for text in axis}
        marks = {m.attributes["data-row"]: int(m.attributes["cy"]) for m in part.all("circle")}
        assert marks["1"] == ends["-inf dB"] == max(ends.values())
        assert marks.get("0", 0) < ends["-inf dB"]
    whole = section(page_of(report(), comparison()), "errors").one("svg", class_="axis")
    assert "-inf" not in whole.text


def test_a_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report().save(path, comparison())
    root = parsed(path.read_text("utf-8"))
    assert root.one("h1").text == "Quantization report"
    assert "21.5 dB" in root.text
    report().save(str(path))
    assert "21.5 dB" not in path.read_text("utf-8")


def test_data(tmp_path: Path) -> None:
    path, notes = tmp_path / "report.JSON", ("größer \N{GREEK SMALL LETTER ALPHA}",)
    report(notes=notes).save(path)
    data = json.loads(path.read_bytes().decode("utf-8"))
    assert qompose.Report.from_dict(data).notes == notes


def test_markdown(tmp_path: Path) -> None:
    path, noted = tmp_path / "report.md", report(notes=("größer",))
    noted.save(path)
    assert path.read_bytes().decode("utf-8") == f"{noted.to_markdown()}\n"
    report().save(path, comparison())
    text = path.read_text("utf-8")
    assert text.startswith(report().to_markdown())
    assert comparison().to_markdown() in text


def test_a_comparison_is_not_left_out_of_data(tmp_path: Path) -> None:
    with pytest.raises(qompose.UserError, match="json"):
        report().save(tmp_path / "report.json", comparison())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["report", "report.txt", "report.htm", ".html"])
def test_other_suffixes(tmp_path: Path, name: str) -> None:
    with pytest.raises(qompose.UserError, match=r"\.html"):
        report().save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", [None, 3, b"report.html"], ids=str)
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(qompose.UserError, match="save"):
        report().save(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["report.html", "report.md", "report.json"])
def test_a_file_stays_where_writing_fails(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text("old")

    def fails(draft: Path, data: bytes) -> int:
        draft.touch()
        raise OSError("no space left")

    monkeypatch.setattr(report_data.Path, "write_bytes", fails)
    with pytest.raises(OSError, match="no space left"):
        report().save(path)
    assert {each: each.read_text() for each in tmp_path.iterdir()} == {path: "old"}

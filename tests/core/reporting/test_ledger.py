# SPDX-License-Identifier: Apache-2.0
"""Reports in files: the suffix says the kind, and a file is whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import qompose
from qompose.reporting import report_data

from tests.core.diagnosis.parsed import parsed
from tests.core.diagnosis.reports import comparison, report


def test_a_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report().save(path, comparison())
    root = parsed(path.read_text("utf-8"))
    assert root.one("h1").text == "Quantization report"
    assert "21.5 dB" in root.text
    report().save(str(path))
    assert "21.5 dB" not in path.read_text("utf-8")


def test_data(tmp_path: Path) -> None:
    path = tmp_path / "report.JSON"
    report(notes=("größer \N{GREEK SMALL LETTER ALPHA}",)).save(path)
    data = json.loads(path.read_bytes().decode("utf-8"))
    assert qompose.Report.from_dict(data).notes == ("größer \N{GREEK SMALL LETTER ALPHA}",)


def test_markdown(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    report(notes=("größer",)).save(path)
    assert path.read_bytes().decode("utf-8") == f"{report(notes=('größer',)).to_markdown()}\n"
    report().save(path, comparison())
    text = path.read_text("utf-8")
    assert text.startswith(report().to_markdown())
    assert comparison().to_markdown() in text


def test_a_comparison_is_not_left_out_of_data(tmp_path: Path) -> None:
    with pytest.raises(qompose.UserError, match=r"would hold the report alone"):
        report().save(tmp_path / "report.json", comparison())
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["report", "report.txt", "report.htm", ".html"])
def test_other_suffixes(tmp_path: Path, name: str) -> None:
    with pytest.raises(qompose.UserError, match=r"must be \.html, \.json or \.md"):
        report().save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", [None, 3, b"report.html"], ids=str)
def test_what_is_no_path(path: object) -> None:
    with pytest.raises(qompose.UserError, match="save expects the path of a file"):
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
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "old"


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(qompose.UserError, match="is a directory"):
        report().save(tmp_path / "report.html")

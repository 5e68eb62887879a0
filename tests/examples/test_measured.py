# SPDX-License-Identifier: Apache-2.0
"""Pages of results are read as they stand, and the one of the sentence encoder has what the demo prints."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

PAGE = """# Accuracy: task

Measured on 2026-01-02 by

```sh
python benchmarks/accuracy.py --tasks task
```

## task

| engine | batches | SQNR, dB | cosine |
|---|---:|---:|---:|
| float |  |  |  |
| peer | 8 | 20.00 | 0.9876 |
| other | 8 | failed |  |

other, 8: RuntimeError
"""


@pytest.fixture(scope="module")
def measured(example: Any) -> ModuleType:
    return example("measured")


def test_page(measured: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE, "utf-8")
    page = measured.read(tmp_path / "page.md")
    assert (page.date, page.command) == ("2026-01-02", "python benchmarks/accuracy.py --tasks task")
    assert page.rows[1:] == (
        {"engine": "peer", "batches": "8", "SQNR, dB": "20.00", "cosine": "0.9876"},
        {"engine": "other", "batches": "8", "SQNR, dB": "failed", "cosine": ""},
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(page.table(["cosine"], "Peers"))
    shown = console.file.getvalue()
    assert "peer" in shown and "0.9876" in shown and "failed" in shown
    assert "float" not in shown and "batches" not in shown
    assert page.date in page.source and page.command in page.source


@pytest.mark.parametrize("part", ["Measured on", "```sh", "| engine |"])
def test_page_that_lacks_something(measured: ModuleType, tmp_path: Path, part: str) -> None:
    (tmp_path / "page.md").write_text(PAGE.replace(part, "?"), "utf-8")
    with pytest.raises(ValueError, match="is no page of results"):
        measured.read(tmp_path / "page.md")


def test_peers_of_the_sentence_encoder(example: Any, measured: ModuleType) -> None:
    sentence = example("sentence_encoder", "executorch", "transformers")
    page = measured.read(sentence.PEERS)
    assert "--tasks minilm-demo" in page.command
    assert {"torchao x86", "nncf", "onnxruntime"} <= {row["engine"] for row in page.rows}
    for row in page.rows:
        assert {*sentence.COMPARED} <= {*row}

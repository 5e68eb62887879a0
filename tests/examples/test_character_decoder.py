# SPDX-License-Identifier: Apache-2.0
"""The model of characters learns, and four bits and a cache in eight leave it what it learned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("transformers", "qompose_x86_inductor", "qompose_embedding", "qompose_xnnpack")


def test_x86_keeps_what_was_learned(example: Any, tmp_path: Path) -> None:
    script, steps = example("character_decoder", *NEEDED, "executorch"), example("steps")
    with steps.Steps() as named:  # what comes after two rows is compiled
        floats, lowered = itertools.islice(script.run(named, 12, 32, tmp_path), 2)
    assert floats.perplexity < 0.75 * script.WORDS  # as much as of one that knows nothing
    assert lowered.perplexity == pytest.approx(floats.perplexity, rel=0.01)
    assert lowered.bytes < 0.5 * floats.bytes
    for row in (floats, lowered):
        assert row.text.startswith(script.START) and len(row.text) > len(script.START)
        assert row.per_second > 0


@pytest.mark.full
def test_the_script(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script = example("character_decoder", *NEEDED, "executorch")
    assert script.main(["--steps", "12", "--wide", "32"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 5 and all("perplexity" in row for row in rows)

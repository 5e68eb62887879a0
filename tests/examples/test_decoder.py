# SPDX-License-Identifier: Apache-2.0
"""The decoder's example generates with a model that was saved and loaded, in a quarter of the bytes."""

from __future__ import annotations

from typing import Any

import pytest

NEEDED = ("decoder", "transformers", "qompose_x86_inductor", "qompose_embedding")


@pytest.mark.full
@pytest.mark.parametrize(("family", "bits", "part"), [("Llama", 4, 0.25), ("Qwen2", 8, 0.35)])
def test_decoder_generates(family: str, bits: int, part: float, example: Any) -> None:
    decoder, steps = example(*NEEDED), example("steps")
    with steps.Steps() as named:
        floats, loaded, compiled = decoder.run(family, bits, 128, 1, named)
    assert floats.sqnr is None
    for row in (loaded, compiled):
        assert row.bytes < part * floats.bytes
        assert row.sqnr > decoder.LEAST[bits]
        assert row.tokens_per_second > 0

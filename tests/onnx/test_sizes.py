# SPDX-License-Identifier: Apache-2.0
"""Sizes that are open: whatever a model makes of them, products stay fused, and numbers stay right."""

from __future__ import annotations

import pytest
import qompose

from tests.onnx.models import sqnr
from tests.onnx.sized import converted

pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("kind", ["reshape", "expand", "resize", "up", "wide"])
def test_products_stay_fused(kind: str) -> None:
    model, x = converted(kind)
    lowered = qompose.lower(model, "onnxruntime", strict=True)
    assert sqnr(model(x), lowered(x)) > 45
    if kind in ("expand", "up"):
        assert not any(node.op_type == "Shape" for node in lowered.model.graph)


class TestOpenVINO:
    @pytest.mark.parametrize("kind", ["expand", "up"])
    def test_sizes_that_constants_can_say_are_right(self, kind: str) -> None:
        pytest.importorskip("openvino")
        model, x = converted(kind)
        assert sqnr(model(x), qompose.lower(model, "openvino", strict=True)(x)) > 45

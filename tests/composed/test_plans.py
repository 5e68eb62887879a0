# SPDX-License-Identifier: Apache-2.0
"""What the real backends take of models of many kinds: their plans are on file."""

from __future__ import annotations

import pytest
import qompose

from tests.golden import FOLDER, assert_golden
from tests.zoo import by_name

PRODUCTS = ("xnnpack", "x86_inductor")
MODELS = ("lenet", "mobilenet_v2", "tied_language_model", "vision_transformer", "cond_conv", "bert")


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", MODELS)
def test_golden_plans(name: str, product: str, regen: bool) -> None:
    quantizer = qompose.compose("embedding", product)
    prepared = qompose.prepare_pt2e(by_name(name).export(), quantizer)
    assert_golden(f"{product}-{name}", prepared, regen=regen)


def test_no_plan_is_on_file_that_nothing_compares() -> None:
    known = {f"{product}-{name}" for product in PRODUCTS for name in MODELS}
    assert {path.stem for path in FOLDER.glob("x*")} == known

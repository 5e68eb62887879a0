# SPDX-License-Identifier: Apache-2.0
"""The plan is data that can be read: the toy quantizer's plans for models of many kinds are on file."""

from __future__ import annotations

import pytest

from tests.core.toy import prepare, toy
from tests.golden import FOLDER, assert_golden
from tests.zoo import by_name

MODELS = (
    "conv_bn_relu",
    "self_concatenation",
    "attention_finite_mask",
    "cond_shared_weight",
    "scan_cell",
    "tied_language_model",
)


@pytest.mark.parametrize("name", MODELS)
def test_golden_plans(name: str, regen: bool) -> None:
    assert_golden(f"toy-{name}", prepare(by_name(name).export(), toy()), regen=regen)


def test_no_plan_is_on_file_that_nothing_compares() -> None:
    assert {path.stem for path in FOLDER.glob("toy-*")} == {f"toy-{name}" for name in MODELS}

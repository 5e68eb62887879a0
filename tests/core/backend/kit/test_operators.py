# SPDX-License-Identifier: Apache-2.0
"""Functions that become operators of torch: their fakes, and what is said of wrong arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from qompose.backend import kit
from qompose.errors import ConfigError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def double(x: Tensor, factor: float) -> Tensor:
    if factor == 0:
        raise ValueError("factor must not be 0")
    return x * factor


SCHEMA = "(Tensor x, float factor) -> Tensor"
FORMS: dict[str, dict[str, Any]] = {
    "by_shape": {"shape": lambda x, factor: x.shape},
    "by_fake": {"fake": lambda x, factor: x.new_empty(x.shape)},
    "by_itself": {},
    "on_cpu": {"devices": ("CPU",), "layout": torch.Tag.flexible_layout},
}
OPERATORS = {
    name: kit.register_operator(
        f"qompose_kit_test::{name}", SCHEMA, double, dtypes={"x": (torch.float32,)}, **options
    )
    for name, options in FORMS.items()
}


@pytest.mark.parametrize("name", FORMS)
def test_computes_and_knows_its_shape(name: str) -> None:
    operator, x = OPERATORS[name], torch.randn(2, 3)
    assert torch.equal(operator(x, 2.0), x * 2)
    with FakeTensorMode() as mode:
        found = operator(mode.from_tensor(x), 2.0)
    assert found.shape == (2, 3) and found.dtype is torch.float32
    torch.library.opcheck(operator, (x, 2.0), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", FORMS)
def test_wrong_arguments_name_the_operator(name: str) -> None:
    operator = OPERATORS[name]
    with pytest.raises(TypeError, match=f"{name}: `x` must be float32, got torch.int8"):
        operator(torch.ones(2, dtype=torch.int8), 2.0)
    with pytest.raises(ValueError, match=f"^qompose_kit_test::{name}: factor"):
        operator(torch.ones(2), 0.0)


def test_an_argument_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no argument weight"):
        kit.register_operator("qompose_kit_test::wrong", SCHEMA, double, dtypes={"weight": ()})

# SPDX-License-Identifier: Apache-2.0
"""What XNNPACK or its runtime gets wrong is written otherwise before it is lowered, and runs as in torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.sampling import at_once

pytest.importorskip("executorch")

CONFIG = get_symmetric_quantization_config
STATIC = CONFIG(is_per_channel=True)
aten = torch.ops.aten


class Behind(nn.Module):
    """A layer, and a function of its output and of further inputs."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.function(self.layer(x), *more)


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def scaled(layer: nn.Module, factor: Tensor) -> nn.Module:
    model = Behind(layer, lambda y: y * model.factor)
    model.register_buffer("factor", factor)
    return model


def cropped(sizes: tuple[int, ...], *, before: bool) -> nn.Module:
    if not before:
        return Behind(nn.Conv2d(4, 4, 3), lambda y: F.pad(y, sizes))
    inner = 3 if len(sizes) == 6 else 4
    return nn.Sequential(nn.ConstantPad2d(sizes, 0.5), nn.Conv2d(inner, 4, 3))


INT4 = CONFIG(is_per_channel=True, weight_qmin=-8, weight_qmax=7)
INT4_DYNAMIC = CONFIG(is_per_channel=True, is_dynamic=True, weight_qmin=-8, weight_qmax=7)
X, LINE, ROWS, NUMBER = image(2, 4, 8, 8), image(2, 4, 8), image(3, 8), torch.tensor(0.7)
Made = tuple[nn.Module, tuple[Tensor, ...], Any]


def cases() -> dict[str, Made]:
    torch.manual_seed(0)
    return {
        "int4 conv2d": (nn.Conv2d(4, 6, 3), (X,), INT4),
        "int4 depthwise": (nn.Conv2d(4, 8, 3, groups=4), (X,), INT4),
        "int4 transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (X,), INT4),
        "int4 conv1d": (nn.Conv1d(4, 6, 3), (LINE,), INT4),
        "int4 dynamic conv2d": (nn.Conv2d(4, 6, 3), (X,), INT4_DYNAMIC),
        "int4 dynamic linear": (nn.Linear(8, 4), (X,), INT4_DYNAMIC),
        **{
            f"bounds in the wrong order, {name}": (
                Behind(nn.Conv2d(3, 8, 3), lambda y, clamp=clamp: (y, clamp(y))), (image(2, 3, 9, 9),), STATIC
            )
            for name, clamp in {
                "clamp": lambda y: y.clamp(0.3, 0.1),
                "hardtanh": lambda y: aten.hardtanh(y, 0.3, 0.1),
            }.items()
        },
        **{
            f"crop {number} {'before' if before else 'behind'}": (cropped(sizes, before=before), (X,), STATIC)
            for number, sizes in enumerate([(-1, 2, 0, -1), (-1, 0, 2, 2, 0, -1)])
            for before in (False, True)
        },
        **{
            f"number {name}": (Behind(nn.Linear(8, 8), function), (ROWS, NUMBER), STATIC)
            for name, function in {
                "relu": lambda y, t: F.relu(y + t), "left": lambda y, t: t - y
            }.items()
        },
        "constant": (scaled(nn.Linear(8, 8), NUMBER), (ROWS,), STATIC),
    }  # fmt: skip


with torch.random.fork_rng():
    CASES = cases()


def converted(model: nn.Module, inputs: tuple[Tensor, ...], config: Any, sizes: Any = None) -> Any:
    exported = torch.export.export(model.eval(), inputs, dynamic_shapes=sizes)
    prepared = qompose.prepare_pt2e(exported, XNNPACKQuantizer().set_global(config))
    prepared(*inputs)
    return qompose.convert_pt2e(prepared)


AT_ONCE = ("int4 conv2d", "bounds in the wrong order, clamp", "crop 0 before")


@cache
def made(at_once: bool) -> dict[str, tuple[Any, Any]]:
    """By case, the converted model and its method: all of one program."""
    cases = [name for name in CASES if (name in AT_ONCE) == at_once]
    names = {name: re.sub(r"\W", "_", name) for name in cases}
    models = {each: converted(*CASES[name]) for name, each in names.items()}
    program = qompose.lower(models, "executorch")
    return {name: (models[each], program.methods[each]) for name, each in names.items()}


@pytest.mark.parametrize("name", at_once(CASES, *AT_ONCE))
def test_runs_as_in_torch(name: str) -> None:
    """Of bounds in the wrong order XNNPACK gave either: 7 x 7 pixels end in the middle of a vector."""
    model, method = made(name in AT_ONCE)[name]
    _, inputs, config = CASES[name]
    wanted, given = model(*inputs), method.run(*inputs)
    for one, other in zip(*(tree_leaves(each) for each in (wanted, given)), strict=True):
        assert torch.allclose(one, other, atol=1e-6 if config is INT4 else 1e-5)
    rows = qompose.report(method).rows
    if "int4" in name:
        assert [row.state for row in rows] == ["int8 kernel"]
    elif name == "constant":
        assert {row.rule for row in rows} == {"linear", "mul"}


@pytest.mark.parametrize("name", [name for name in CASES if "number" in name])
def test_sums_with_a_number_are_left_in_float(name: str) -> None:
    rows = qompose.report(converted(*CASES[name])).rows
    assert any("dimensions" in row.reason for row in rows)


@pytest.mark.full
def test_cropping_of_a_batch_known_at_run_time() -> None:
    model = nn.Sequential(nn.ZeroPad2d((-1, 2, 0, -1)), nn.Conv2d(4, 4, 3))
    batch = {0: torch.export.Dim("batch", max=4)}
    made = converted(model, (X,), STATIC, (batch,))
    program, x = qompose.lower(made, "executorch"), image(3, 4, 8, 8)
    assert torch.allclose(program.run(x), made(x), atol=1e-6)

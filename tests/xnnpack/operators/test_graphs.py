# SPDX-License-Identifier: Apache-2.0
"""Every operator in a graph: copied, exported, saved, compiled, with batches of any size."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from qompose_xnnpack import operators
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sampling import at_once
from tests.xnnpack.operators.arithmetic import FULL, KERNELS, int8, linear_dynamic, weights

OUT = (0.1, 2, *FULL)
INT8 = (0.1, 2)
GEOMETRY = ([1, 1], [1, 1], [1, 1])


class AllKernels(torch.nn.Module):
    """Every operator once, on one int8 image."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "conv": (8, 4, 3, 3), "deep": (8, 1, 3, 3), "up": (8, 8, 2, 2), "line": (8, 8, 3),
            "spread": (8, 8, 3), "head": (5, 8), "mixed": (8, 8, 3, 3), "mixed_up": (8, 8, 2, 2),
            "rows": (6, 8),
        }  # fmt: skip
        for seed, (name, shape) in enumerate(shapes.items()):
            self.register_buffer(name, weights(seed, *shape))
        self.register_buffer("scale", torch.full((8,), 0.01))
        self.register_buffer("bias", torch.linspace(-1, 1, 8))
        self.register_buffer("groups", torch.full((6, 2), 0.02))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.images(x)
        row = self.lines(y)
        flat = KERNELS.mean(row, *INT8, [2], False, *OUT)
        head = KERNELS.linear(flat, *INT8, self.head, self.scale[:1], None, *OUT)
        return head, *self.floats(y, flat)

    def images(self, x: Tensor) -> Tensor:
        constants = (self.scale, self.bias)
        y = KERNELS.conv2d(x, *INT8, self.conv, *constants, *GEOMETRY, 1, *OUT)
        z = KERNELS.conv2d(y, *INT8, self.deep, self.scale, None, *GEOMETRY, 8, *OUT)
        z = KERNELS.sub(KERNELS.add(y, *INT8, z, *INT8, *OUT), *INT8, y, *INT8, *OUT)
        y = KERNELS.mul(z, *INT8, y, *INT8, *OUT)
        y = KERNELS.max_pool2d(y, [2], [2], [0], [1], False, *FULL)
        transposed = ([2], [0], [1], 1, [1])
        y = KERNELS.conv_transpose2d(y, *INT8, self.up, *constants, *transposed, *OUT)
        return KERNELS.avg_pool2d(y, *INT8, [2], [1], [0], False, True, None, *OUT)

    def lines(self, y: Tensor) -> Tensor:
        constants = (self.scale, self.bias)
        row = KERNELS.adaptive_avg_pool2d(y, *INT8, [1, 4], *OUT).squeeze(2)
        row = KERNELS.conv1d(row, *INT8, self.line, *constants, [1], [1], [1], 1, *OUT)
        transposed = ([1], [1], [0], 1, [1])
        return KERNELS.conv_transpose1d(row, *INT8, self.spread, *constants, *transposed, *OUT)

    def floats(self, y: Tensor, flat: Tensor) -> tuple[Tensor, ...]:
        image, row = (y.to(torch.float32) - 2) * 0.1, (flat.to(torch.float32) - 2) * 0.1
        constants = (self.mixed, self.scale, self.bias)
        upwards = (self.mixed_up, *constants[1:], [2], [0], [1], 1, [1])
        return (
            KERNELS.conv2d_dynamic(image, *constants, *GEOMETRY, 1, -math.inf, math.inf),
            KERNELS.conv_transpose2d_dynamic(image, *upwards, 0.0, math.inf),
            linear_dynamic(row, self.rows, self.groups, None, 0.0, math.inf),
            linear_dynamic(row, self.rows, self.groups, None, 0.0, math.inf, per_tensor=True),
            KERNELS.linear_weight_only(row, self.rows, self.groups, None),
        )


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(expected) == 6
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_exported_with_dynamic_shapes_saved_and_loaded() -> None:
    model, x = copy.deepcopy(AllKernels()), int8(0, 2, 4, 9, 9)
    shapes = ({0: torch.export.Dim("batch"), 3: torch.export.Dim("width", min=6)},)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,), dynamic_shapes=shapes), file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for shape in ((2, 4, 9, 9), (5, 4, 9, 12)):
        x = int8(1, *shape)
        assert_same(loaded(x), model(x))


@pytest.mark.full
def test_compile_with_dynamic_shapes() -> None:
    model = AllKernels()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    with torch.inference_mode():
        for shape in ((2, 4, 9, 9), (5, 4, 9, 12)):
            x = int8(1, *shape).to(memory_format=torch.channels_last)
            assert_same(compiled(x), model(x))


def test_an_empty_batch() -> None:
    shapes = [tuple(part.shape) for part in AllKernels()(int8(0, 0, 4, 9, 9))]
    assert shapes == [(0, 5), (0, 8, 8, 8), (0, 8, 17, 17), (0, 6), (0, 6), (0, 6)]


@pytest.mark.parametrize("name", at_once(operators.SCHEMAS, *[*operators.SCHEMAS][::2]))
def test_operators_keep_the_contract_of_torch(name: str) -> None:
    calls: list[tuple[Any, ...]] = []
    operator = getattr(KERNELS, name).default

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is operator:
                calls.append(args)
            return func(*args, **(kwargs or {}))

    with Recorder():
        AllKernels()(int8(0, 2, 4, 9, 9))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, calls[0], test_utils=checks)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(TypeError, match=r"::add: `a`.*float32"):
        KERNELS.add(torch.ones(3), 0.1, 0, int8(0, 3), 0.1, 0, *OUT)
    with pytest.raises(TypeError, match=r"::sub: `b`.*uint8"):
        KERNELS.sub(int8(0, 3), 0.1, 0, int8(0, 3).to(torch.uint8), 0.1, 0, *OUT)
    with pytest.raises(ValueError, match=r"::linear: .*\(2, 4\)"):
        KERNELS.linear(int8(0, 2, 4), 0.1, 0, weights(0, 3, 5), torch.ones(1), None, *OUT)
    with pytest.raises(ValueError, match=r"::conv1d: .*\(2, 4, 6\)"):
        constants = (weights(0, 3, 5, 2), torch.ones(1), None)
        KERNELS.conv1d(int8(0, 2, 4, 6), 0.1, 0, *constants, [1], [0], [1], 1, *OUT)

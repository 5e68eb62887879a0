# SPDX-License-Identifier: Apache-2.0
"""Beside torchao's X86InductorQuantizer: all that it quantizes. What it fails at is in tests/interop."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.toy import Model, randn
from tests.sampling import at_once
from tests.x86_inductor.small_models import assert_lowers_right, converted

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*maxpool2d is not quant")

IMAGE, SEQUENCE, ROWS = randn(2, 4, 8, 8), randn(2, 4, 9), randn(2, 3, 8)


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """torchao's quantizer. Importing it changes a global setting of Inductor (D12), which is put back."""
    settings: Any = torch._inductor.config
    before = settings.pre_grad_custom_pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns about itself while it is imported
        pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
        from torchao.quantization.pt2e import quantize_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    config = x86.get_default_x86_inductor_quantization_config()

    def quantized(model: nn.Module, x: Tensor, *, strict: bool) -> Counter[str]:
        exported = torch.export.export(model.eval(), (x,), strict=strict).module()
        quantizer = x86.X86InductorQuantizer().set_global(config)
        prepared = quantize_pt2e.prepare_pt2e(exported, quantizer)
        prepared(x)
        return quantized_operators(quantize_pt2e.convert_pt2e(prepared))

    yield quantized
    settings.pre_grad_custom_pass = before


def quantized_operators(model: GraphModule) -> Counter[str]:
    """How many calls of each operator read integers, by its name without overload."""
    return Counter(
        node.target._schema.name.removeprefix("aten::")
        for node in model.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.name.startswith("quantized_decomposed")
        and any("dequantize" in str(source.target) for source in node.all_input_nodes)
    )


def conv(channels: int = 4, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, 4, 3, padding=1, **options)


def sequence(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for make in layers))


def linear(rows: int = 8, columns: int = 8) -> Callable[[], nn.Module]:
    return partial(nn.Linear, rows, columns)


ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.SiLU, nn.GELU, nn.LeakyReLU)
PARITY: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "conv2d": (conv, IMAGE),
    **{f"conv2d {act.__name__}": (sequence(conv, act), IMAGE) for act in ACTIVATIONS},
    "conv2d in place": (sequence(conv, partial(nn.ReLU, inplace=True)), IMAGE),
    "conv2d bn": (sequence(conv, partial(nn.BatchNorm2d, 4), nn.ReLU), IMAGE),
    "conv1d relu": (sequence(partial(nn.Conv1d, 4, 4, 3), nn.ReLU), SEQUENCE),
    "conv1d": (partial(nn.Conv1d, 4, 4, 3), SEQUENCE),
    "conv2d add": (lambda: Model(lambda m, x: m.conv(x) + x, conv=conv()), IMAGE),
    "conv2d add relu": (
        lambda: Model(lambda m, x: m.relu(x + m.conv(x)), conv=conv(), relu=nn.ReLU()),
        IMAGE,
    ),
    "linear": (linear(), ROWS),
    **{f"linear {a.__name__}": (sequence(linear(), a), ROWS) for a in (*ACTIVATIONS, nn.Tanh)},
    "linear add": (lambda: Model(lambda m, x: m.linear(x) + x, linear=linear()()), ROWS),
    "linear add relu": (
        lambda: Model(lambda m, x: m.relu(m.linear(x) + x), linear=linear()(), relu=nn.ReLU()),
        ROWS,
    ),
    "mul": (lambda: Model(lambda m, x: m.c(m.a(x) * m.b(x)), a=conv(), b=conv(), c=conv()), IMAGE),
    "matmul": (lambda: Model(lambda m, x: m.a(x) @ m.b(x).mT, a=linear()(), b=linear()()), ROWS),
    "max pool": (sequence(conv, nn.ReLU, partial(nn.MaxPool2d, 2), conv), IMAGE),
    "average pool": (sequence(conv, nn.ReLU, partial(nn.AvgPool2d, 2), conv), IMAGE),
    "head": (sequence(conv, nn.ReLU, partial(nn.AdaptiveAvgPool2d, 1), nn.Flatten, linear(4, 3)), IMAGE),
    "cat": (
        lambda: Model(
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=conv(), b=conv(), c=conv(8)
        ),
        IMAGE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    at_once(
        PARITY,
        *("conv2d in place", "conv2d bn", "conv1d", "conv2d add relu", "linear GELU", "linear add"),
        *("mul", "matmul", "average pool", "head", "cat"),
    ),
)
def test_all_that_torchao_quantizes(theirs: Any, name: str) -> None:
    make, x = PARITY[name]
    model = make()
    result = converted(model, x)
    more = Counter({"conv1d": name == "conv1d"})  # without a function behind it, which they leave
    assert quantized_operators(result) == theirs(model, x, strict=True) + more
    assert_lowers_right(result, x)

# SPDX-License-Identifier: Apache-2.0
"""Products of few rows become a part of compiled code, and compute what the lowered model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose_x86_inductor.inductor import gemm_template
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.export import Dim
from torch.fx import Graph

from tests.core.toy import Model
from tests.sampling import at_once
from tests.x86_inductor.small_models import lowered

WIDTH = 48
CALL = "= torch.ops.onednn.qlinear_pointwise"
pytestmark = [
    pytest.mark.usefixtures("nothing_is_kept"),
    pytest.mark.usefixtures("by_onednn"),
    pytest.mark.filterwarnings("ignore:The tensor attributes.*assigned during export"),  # of a GRU
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]


def perceptron(activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), activation(), nn.Linear(32, 16)).eval()


def image_net() -> nn.Module:
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(features, nn.Linear(16, 10)).eval()


def skip() -> nn.Module:
    layers = {"inner": perceptron(), "outer": nn.Linear(WIDTH, 16)}
    return Model(lambda m, x: torch.relu(m.inner(x) + m.outer(x)), **layers)


def similar(m: Any, x: Tensor) -> Tensor:
    """A product of weights, and one of two activations."""
    y = m.inner(x)
    return torch.mm(y, y.t())


def recurrent(m: Any, x: Tensor) -> Tensor:
    """A layer that torch makes of products in float, behind one in int8."""
    return m.gru(m.inner(x).unsqueeze(0))[0]


def one_gelu() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU())


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


ADVICE: dict[str, tuple[nn.Module, Tensor, Any, bool]] = {
    "one row": (perceptron(), rows(1), {}, True),
    "more rows": (perceptron(), rows(gemm_template.MOST_ROWS + 1), {}, False),
    "rows of rank 3": (perceptron(), rows(60).reshape(3, 20, WIDTH), {}, True),
    "more of rank 3": (perceptron(), rows(300).reshape(3, 100, WIDTH), {}, False),
    "more of gelu": (one_gelu(), rows(65), {}, False),
    "one of two": (perceptron(nn.GELU), rows(65), {}, True),
    "any rows": (perceptron(), rows(4), {"dynamic_shapes": ({0: Dim("batch", max=8)},)}, True),
    "any rows of gelu": (one_gelu(), rows(4), {"dynamic_shapes": ({0: Dim("batch", max=8)},)}, False),
    "behind convolutions": (image_net(), torch.randn(2, 3, 8, 8), {}, True),
    "no linear": (nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), {}, False),
    "a product in float": (Model(similar, inner=perceptron()), rows(3), {}, False),
    "a gru": (Model(recurrent, inner=perceptron(), gru=nn.GRU(16, 8, batch_first=True)), rows(6), {}, False),
    "dynamic": (perceptron(), rows(2), {"is_dynamic": True}, False),
    "per token": (perceptron(), rows(2), {"is_dynamic": True, "per_token": True}, False),
    "weight-only": (perceptron(), rows(2), {"weight_only": True}, False),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    at_once(
        ADVICE, "one row", "more rows", "one of two", "any rows of gelu", "a gru", "dynamic", "per token"
    ),
)  # fmt: skip
def test_who_is_advised(name: str) -> None:
    module, x, options, advised = ADVICE[name]
    expected, model = gemm_template.OPTIONS if advised else {}, lowered(module, x, **options)
    assert gemm_template.options(model) == expected
    with torch.inference_mode():
        assert gemm_template.options(model) == expected


@pytest.mark.parametrize(
    ("functions", "most"),
    [(("relu",), gemm_template.MOST_ROWS), (("gelu",), gemm_template.MOST_ROWS_OF_THEM)],
)
def test_how_many_rows_are_few(functions: tuple[str], most: int) -> None:
    x = Graph().placeholder("x")
    call = x.graph.call_function(torch.relu, (x, *functions))
    for count, few in ((0, False), (1, True), (most, True), (most + 1, False)):
        x.meta["val"] = rows(count)
        assert gemm_template.is_faster(call) is few


COMPILED = {
    "relu": (perceptron(), {}), "hardswish": (perceptron(nn.Hardswish), {}),
    "leaky_relu": (perceptron(nn.LeakyReLU), {}), "relu6": (perceptron(nn.ReLU6), {}),
    "tanh": (perceptron(nn.Tanh), {}), "add": (skip(), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", at_once(COMPILED, "add"))
def test_the_compiled_code_calls_no_onednn_and_computes_the_same(name: str) -> None:
    """Within a step of the integers between the layers: the two round float arithmetic apart."""
    (module, choices), x = COMPILED[name], rows(7)
    model = lowered(module, x, **choices)
    expected = model(x)
    result, code = run_and_get_code(lambda: qompose.compile_lowered(model)(x))
    assert gemm_template.options(model)
    assert CALL not in "".join(code)
    assert (result - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("activation", [nn.GELU, nn.Tanh])
def test_what_onednn_does_faster_is_left_to_it(activation: Callable[[], nn.Module]) -> None:
    x = rows(80)
    model = lowered(perceptron(activation), x)
    result, code = run_and_get_code(lambda: qompose.compile_lowered(model)(x))
    assert "".join(code).count(CALL) == 1
    assert (result - model(x)).abs().max() < 0.01 * model(x).abs().max()


@pytest.mark.full
def test_one_program_for_any_number_of_rows() -> None:
    model = lowered(perceptron(), rows(8), dynamic_shapes=({0: Dim("batch", max=512)},))
    compiled = qompose.compile_lowered(model, "package")
    for count in (1, 2, 17, 512):
        torch.testing.assert_close(compiled(rows(count)), model(rows(count)), atol=0.02, rtol=0)


@pytest.mark.full
def test_a_sum_of_two_products_with_scales_at_run_time() -> None:
    """Torch 2.13 computes it wrongly where the template is allowed."""
    model, x = lowered(skip(), rows(7), is_dynamic=True), rows(7)
    result = qompose.compile_lowered(model, options=gemm_template.OPTIONS)(x)
    torch.testing.assert_close(result, model(x))


@pytest.mark.full
def test_what_users_ask_for_counts() -> None:
    model, x = lowered(perceptron(), rows(2)), rows(2)
    options = {"max_autotune_gemm": False}
    _, code = run_and_get_code(lambda: qompose.compile_lowered(model, options=options)(x))
    assert CALL in "".join(code)


@pytest.mark.full
@pytest.mark.parametrize("extreme", [0, 255])
def test_the_largest_sums_are_exact(extreme: int) -> None:
    """Weights of -127 and 127 beside one end of the inputs, by the integers themselves."""
    module = nn.Sequential(nn.Linear(512, 16, bias=False)).eval()
    with torch.no_grad():
        module[0].weight.copy_(torch.tensor([1.0, -1.0]).repeat(8)[:, None].expand(16, 512))
    calibration = torch.linspace(-1, 1, 512)[None]
    model = lowered(module, calibration)
    x = torch.full((1, 512), -1.0 if extreme == 0 else 1.0)
    expected, result = model(x), qompose.compile_lowered(model)(x)
    assert expected.abs().min() > 500
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)

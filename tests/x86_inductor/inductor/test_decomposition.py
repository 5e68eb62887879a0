# SPDX-License-Identifier: Apache-2.0
"""Lowered networks through what people do with a graph: copy, save, export, compile, package."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from qompose_x86_inductor.inductor.decomposition import with_prepack_in_graph
from qompose_x86_inductor.native import processor, products
from qompose_x86_inductor.onednn import exactness
from torch import Tensor, fx, nn

from tests.core.toy import Model, export, randn
from tests.processes import python
from tests.sampling import at_once
from tests.x86_inductor import small_models

OPS = torch.ops.qompose_x86
# torch 2.13 warns about itself: copying a graph, and Inductor when it freezes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
GEOMETRY = ([1, 1], [1, 1], [1, 1], 1)


class Lowered(torch.nn.Module):
    """quantize -> conv, relu -> max_pool -> conv + skip, relu -> mean -> linear, gelu."""

    def __init__(self, x_dtype: torch.dtype, weights: tuple[int, int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x_dtype, self.shift = x_dtype, 0 if x_dtype == torch.uint8 else -128
        for name, shape in {"stem": (16, 3, 3, 3), "body": (16, 16, 3, 3), "head": (5, 16)}.items():
            low, high = weights
            weight = torch.randint(low, high + 1, shape, dtype=torch.int8, generator=generator)
            scale = torch.rand(shape[0], generator=generator) * 0.002 + 0.0005
            self.register_buffer(f"{name}_weight", weight)
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_bias", torch.randn(shape[0], generator=generator))

    def product(self, name: str, x: Tensor, scale: float, zero_point: int) -> tuple[Any, ...]:
        buffers = (self.get_buffer(f"{name}_{part}") for part in ("weight", "scale", "bias"))
        return (x, scale, zero_point + self.shift, *buffers)

    def quantize(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        steps = torch.round(x / scale) + zero_point + self.shift
        return steps.clamp(self.shift, 255 + self.shift).to(self.x_dtype)

    def forward(self, x: Tensor) -> Tensor:
        zero = 10 + self.shift
        out = (0.04, zero, self.x_dtype, "relu")
        stem = self.product("stem", self.quantize(x, 0.02, 128), 0.02, 128)
        y = OPS.max_pool2d(OPS.conv2d(*stem, *GEOMETRY, *out), [2, 2], [2, 2])
        body = self.product("body", y, 0.04, 10)
        y = OPS.conv2d_add(*body, *GEOMETRY, y, 0.04, zero, *out)
        y = ((y.float() - zero) * 0.04).mean((2, 3))
        head = self.product("head", self.quantize(y, 0.02, 10), 0.02, 10)
        return OPS.linear(*head, post_op="gelu", algorithm="tanh")


@pytest.fixture(params=at_once((torch.uint8, torch.int8), torch.int8), ids=str)
def lowered(request: pytest.FixtureRequest) -> fx.GraphModule:
    """Exported, as a lowered graph is: weights as attributes, shapes on the nodes."""
    module = Lowered(request.param, exactness.recommended_weight_range()).eval()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    return torch.export.export(module, (inputs(4),), dynamic_shapes=dynamic).module()


def inputs(batch: int) -> Tensor:
    return randn(batch, 3, 16, 12, seed=batch)


def assert_same(run: Any, gm: fx.GraphModule, batches: tuple[int, ...] = (4, 2, 7)) -> None:
    """Equal up to a step of the activations; their scale is 0.04 and they are averaged."""
    for batch in batches:
        torch.testing.assert_close(run(inputs(batch)), gm(inputs(batch)), atol=5e-3, rtol=1e-4)


@pytest.fixture(autouse=True)
def no_global_setting_changes() -> Any:
    freezing, gradients = torch._inductor.config.freezing, torch.is_grad_enabled()
    yield
    torch._dynamo.reset()
    assert (torch._inductor.config.freezing, torch.is_grad_enabled()) == (freezing, gradients)


def test_graphs_of_the_plain_operators(lowered: fx.GraphModule, tmp_path: Path) -> None:
    """After they ran, with packed weights beside them: copied, saved and compiled."""
    lowered(inputs(2))
    assert_same(copy.deepcopy(lowered), lowered)
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(lowered, (inputs(4),), dynamic_shapes=dynamic)
    torch.export.save(program, tmp_path / "lowered.pt2")
    assert_same(torch.export.load(tmp_path / "lowered.pt2").module(), lowered)
    assert_same(torch.compile(lowered, backend="aot_eager", dynamic=True, fullgraph=True), lowered)


@pytest.mark.usefixtures("by_onednn")
def test_prepack_in_graph_resolves_into_onednn_operators(lowered: fx.GraphModule) -> None:
    before = lowered.code
    prepacked = with_prepack_in_graph(lowered)
    assert_same(prepacked, lowered)
    assert lowered.code == before != prepacked.code
    assert prepacked.stem_weight is lowered.stem_weight
    program = torch.export.export(prepacked, (inputs(4),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("onednn.qconv_prepack.default") == 2
    # These stay until the compiler's own passes are through.
    late = {"qompose_x86.conv2d_sum.default", "qompose_x86.unchanged.default"}
    sums = targets.count("qompose_x86.conv2d_sum.default")
    assert (targets.count("onednn.qconv_pointwise.default"), sums) in [(2, 0), (1, 1)]
    assert targets.count("onednn.qlinear_pointwise.default") == 1
    assert {target for target in targets if "qompose_x86." in target} <= late


BEHIND: dict[str, tuple[list[nn.Module], Tensor, bool]] = {
    "integers, then a clamp": (
        [nn.Conv2d(4, 4, 1), nn.Hardtanh(-1, 1), nn.ReLU6(), nn.Conv2d(4, 4, 1)],
        torch.randn(2, 4, 6, 6),
        False,
    ),
    "narrow integers": ([nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)], torch.randn(2, 4, 6, 6), True),
    "two functions behind a convolution": (
        [nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Hardtanh(-0.5, 0.6)],
        torch.randn(2, 4, 6, 6),
        False,
    ),
    "two functions behind a linear": ([nn.Linear(8, 8), nn.ReLU(), nn.GELU()], torch.randn(4, 8), False),
}  # fmt: skip


@pytest.mark.usefixtures("by_onednn")
@pytest.mark.parametrize(
    ("case", "mode"),
    at_once(
        itertools.product(BEHIND, ("default", "package")),
        ("two functions behind a linear", "default"),
    ),
)
def test_what_the_compilers_own_patterns_would_fuse(case: str, mode: str) -> None:
    """They fail on products that have a function in them already, or give integers (torch 2.13)."""
    layers, x, reduce_range = BEHIND[case]
    model = small_models.lowered(nn.Sequential(*layers), x, reduce_range=reduce_range)
    got, expected = qompose.compile_lowered(model, mode)(x), model(x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert got.stride() == expected.stride()


@pytest.mark.filterwarnings("ignore:An operator in compiled code:UserWarning")
@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_operators_of_ours_in_the_graph(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any processor: where they are not compiled they run on torch's. Weights have seven bits for AVX2."""
    monkeypatch.setattr(processor, "isa", lambda: processor.AVX2)

    def function(m: Any, x: Tensor) -> Tensor:
        y = m.first(x).flatten(2)
        return y + m.second(y)

    model = Model(function, first=nn.Conv2d(channels, 6, 1), second=nn.Linear(20, 20))
    x = randn(3, channels, 5, 4)
    lowered = small_models.lowered(model, x, isa="avx2")
    prepacked = with_prepack_in_graph(lowered)
    torch.testing.assert_close(prepacked(x), lowered(x), atol=1e-4, rtol=1e-4)
    targets = [node.target for node in torch.export.export(prepacked, (x,)).graph.nodes]
    assert targets.count(products.PRODUCT) == 2
    assert (products.PLANES in targets) is (channels in (2, 4))


@pytest.mark.usefixtures("by_onednn")
def test_inexact_weights_stay_with_their_operator(
    monkeypatch: pytest.MonkeyPatch, lowered: fx.GraphModule
) -> None:
    monkeypatch.setattr(exactness, "admits", lambda weight: weight.dim() == 4)
    prepacked = with_prepack_in_graph(lowered)
    left = {str(n.target) for n in prepacked.graph.nodes if "qompose_x86." in str(n.target)}
    assert left - {"qompose_x86.unchanged.default"} == {"qompose_x86.linear.default"}
    assert_same(prepacked, lowered)


def residual(m: Any, image: Tensor, word: Tensor) -> Tensor:
    """What a lowered graph is made from: a skip, a pool, a gelu, an embedding of another backend."""
    y = F.max_pool2d(m.stem(image * m.words(word)[:, None, None]).relu(), 2)
    y = (m.body(y) + y).relu()
    return F.gelu(m.head(y.mean((2, 3))))


def arguments(batch: int) -> tuple[Tensor, Tensor]:
    return inputs(batch), torch.arange(batch) % 20


@pytest.fixture(scope="module")
def result() -> qompose.QuantizedModel:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=1, max=64)
    convolutions = {"stem": nn.Conv2d(3, 16, 3, padding=1), "body": nn.Conv2d(16, 16, 3, padding=1)}
    model = Model(residual, words=nn.Embedding(20, 12), **convolutions, head=nn.Linear(16, 5))
    exported = export(model, *arguments(4), dynamic_shapes=({0: batch}, {0: batch}))
    calibration = [arguments(8) for _ in range(2)]
    made = qompose.quantize(
        exported, backends=["embedding", "x86_inductor"], calibration=calibration
    )
    qompose.assert_lowered(made.model, 1.0)
    return made


@pytest.mark.full
def test_compiled_with_another_backend(result: qompose.QuantizedModel) -> None:
    compiled = result.compile()
    for batch in (4, 2, 7):
        expected = result.model(*arguments(batch))
        torch.testing.assert_close(compiled(*arguments(batch)), expected, atol=5e-3, rtol=1e-4)


@pytest.mark.full
def test_package_runs_on_torch_alone(result: qompose.QuantizedModel, tmp_path: Path) -> None:
    result.compile("package", path=tmp_path / "model.pt2")
    cases = {n: (arguments(n), result.model(*arguments(n))) for n in (4, 2, 7)}
    torch.save(cases, tmp_path / "cases.pt")
    code = (
        "import sys, torch\n"
        "model = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "for x, y in torch.load(sys.argv[2]).values():\n"
        "    torch.testing.assert_close(model(*x), y, atol=5e-3, rtol=1e-4)\n"
        "assert 'qompose' not in sys.modules and 'qompose_x86_inductor' not in sys.modules"
    )
    files = [tmp_path / name for name in ("model.pt2", "cases.pt")]
    python("-I", "-c", code, *files, to_the_end=True)


@pytest.mark.usefixtures("by_onednn")
def test_inexact_weights_are_not_packaged(
    monkeypatch: pytest.MonkeyPatch, result: qompose.QuantizedModel, tmp_path: Path
) -> None:
    monkeypatch.setattr(exactness, "admits", lambda weight: weight.dim() == 4)
    with pytest.raises(qompose.errors.CompilationError, match="linear in head"):
        result.compile("package", path=tmp_path / "model.pt2")
    assert not any(tmp_path.iterdir())

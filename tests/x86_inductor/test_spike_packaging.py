# SPDX-License-Identifier: Apache-2.0
"""One lowered network through what people do with a graph: copy, save, export, compile, package."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose_x86_inductor import compiling, isa, packing
from torch import Tensor, fx

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


@pytest.fixture(params=[torch.uint8, torch.int8], ids=str)
def lowered(request: pytest.FixtureRequest) -> fx.GraphModule:
    """Exported, as a lowered graph is: weights as attributes, shapes on the nodes."""
    module = Lowered(request.param, isa.recommended_weight_range()).eval()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    return torch.export.export(module, (inputs(4),), dynamic_shapes=dynamic).module()


def inputs(batch: int) -> Tensor:
    return torch.randn(batch, 3, 16, 12, generator=torch.Generator().manual_seed(batch))


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


def test_deepcopy(lowered: fx.GraphModule) -> None:
    lowered(inputs(2))
    assert_same(copy.deepcopy(lowered), lowered)


def test_torch_save_of_the_module(lowered: fx.GraphModule) -> None:
    lowered(inputs(2))
    module = Lowered(torch.uint8, (-64, 63))
    expected = module(inputs(2))
    for whole in (module, copy.deepcopy(module)):
        stream = io.BytesIO()
        torch.save(whole, stream)
        stream.seek(0)
        assert torch.equal(torch.load(stream, weights_only=False)(inputs(2)), expected)


def test_export_save_and_load(lowered: fx.GraphModule, tmp_path: Path) -> None:
    lowered(inputs(2))
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(lowered, (inputs(4),), dynamic_shapes=dynamic)
    torch.export.save(program, tmp_path / "lowered.pt2")
    assert_same(torch.export.load(tmp_path / "lowered.pt2").module(), lowered)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_torch_compile_of_the_plain_operators(
    lowered: fx.GraphModule, dynamic: bool | None
) -> None:
    assert_same(torch.compile(lowered, dynamic=dynamic, fullgraph=True), lowered)


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_compile_lowered(lowered: fx.GraphModule, dynamic: bool | None) -> None:
    assert_same(compiling.compile_lowered(lowered, (inputs(4),), dynamic=dynamic), lowered)


def test_prepack_in_graph_resolves_into_onednn_operators(lowered: fx.GraphModule) -> None:
    before = lowered.code
    prepacked = compiling.with_prepack_in_graph(lowered)
    assert_same(prepacked, lowered)
    assert lowered.code == before
    assert prepacked.stem_weight is lowered.stem_weight
    program = torch.export.export(prepacked, (inputs(4),))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("onednn.qconv_prepack.default") == 2
    assert targets.count("onednn.qconv_pointwise.default") == 2
    assert targets.count("onednn.qlinear_pointwise.default") == 1
    assert not any("qompose_x86." in target for target in targets)


def test_package_runs_on_torch_alone(lowered: fx.GraphModule, tmp_path: Path) -> None:
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    path = compiling.package_lowered(
        lowered, (inputs(4),), tmp_path / "lowered.pt2", dynamic_shapes=(batch,)
    )
    torch.save({n: (inputs(n), lowered(inputs(n))) for n in (4, 2, 7)}, tmp_path / "cases.pt")
    code = (
        "import sys, torch\n"
        "model = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "for x, y in torch.load(sys.argv[2]).values():\n"
        "    torch.testing.assert_close(model(x), y, atol=5e-3, rtol=1e-4)\n"
        "assert 'qompose' not in sys.modules and 'qompose_x86_inductor' not in sys.modules"
    )
    command = [sys.executable, "-I", "-c", code, path, str(tmp_path / "cases.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_inexact_weights_stay_with_their_operator(
    monkeypatch: pytest.MonkeyPatch, lowered: fx.GraphModule, tmp_path: Path
) -> None:
    monkeypatch.setattr(isa, "admits", lambda weight: weight.dim() == 4)
    prepacked = compiling.with_prepack_in_graph(lowered)
    left = {str(n.target) for n in prepacked.graph.nodes if "qompose_x86." in str(n.target)}
    assert left == {"qompose_x86.linear.default"}
    with pytest.raises(ValueError, match="cannot package linear"):
        compiling.package_lowered(lowered, (inputs(4),), tmp_path / "lowered.pt2")


class TestPackedWeights:
    """The table beside the weights."""

    @staticmethod
    def run(weight: Tensor) -> Tensor:
        x = torch.ones(1, weight.shape[1], dtype=torch.uint8)
        result: Tensor = OPS.linear(x, 1.0, 0, weight, torch.ones(weight.shape[0]), None)
        return result

    def test_go_with_their_weight(self) -> None:
        gc.collect()
        before = packing.table_size()
        weight = torch.ones(4, 8, dtype=torch.int8)
        self.run(weight)
        self.run(weight)
        assert packing.table_size() == before + 1
        del weight
        gc.collect()
        assert packing.table_size() == before

    @pytest.mark.parametrize("inference", [False, True], ids=["ordinary", "inference"])
    def test_follow_a_write(self, inference: bool) -> None:
        with torch.inference_mode(inference):
            weight = torch.ones(4, 8, dtype=torch.int8)
            assert self.run(weight).unique().tolist() == [8.0]
            weight[:2].fill_(3)
            assert self.run(weight)[0].tolist() == [24.0, 24.0, 8.0, 8.0]
            weight.data = torch.full((4, 8), 2, dtype=torch.int8)
            assert self.run(weight).unique().tolist() == [16.0]

    def test_are_not_copied(self) -> None:
        weight = torch.ones(4, 8, dtype=torch.int8)
        self.run(weight)
        twin = copy.deepcopy(weight)
        twin.fill_(5)
        assert self.run(twin).unique().tolist() == [40.0]
        assert self.run(weight).unique().tolist() == [8.0]

    def test_serve_any_layout_of_the_weight(self) -> None:
        weight = torch.randint(-128, 128, (8, 4), dtype=torch.int8).t()
        assert torch.equal(self.run(weight)[0], weight.sum(1).float())
        kernel = torch.randint(-128, 128, (4, 3, 2, 2), dtype=torch.int8)
        geometry = ([1, 1], [0, 0], [1, 1], 1)
        x = torch.randint(0, 256, (1, 3, 5, 5), dtype=torch.uint8)
        for layout in (torch.contiguous_format, torch.channels_last):
            w = kernel.contiguous(memory_format=layout)
            got = OPS.conv2d(x, 1.0, 7, w, torch.ones(4), None, *geometry)
            assert torch.equal(
                got, F.conv2d(x.double() - 7, kernel.double(), None, *geometry).float()
            )

    def test_serve_other_image_sizes_than_the_first(self) -> None:
        kernel = torch.randint(-128, 128, (16, 8, 3, 3), dtype=torch.int8)
        geometry = ([1, 1], [1, 1], [1, 1], 1)
        for size in (3, 33, 1, 14):
            x = torch.randint(0, 256, (size % 3, 8, size, size + 1), dtype=torch.uint8)
            got = OPS.conv2d(x, 1.0, 7, kernel, torch.ones(16), None, *geometry)
            assert torch.equal(
                got, F.conv2d(x.double() - 7, kernel.double(), None, *geometry).float()
            )

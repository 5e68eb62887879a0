# SPDX-License-Identifier: Apache-2.0
"""Q/DQ graphs on the real ExecuTorch runtime, against the kernels of the ``torch`` target."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qompose.backend import CallSignature
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError, MissingExecutorchError
from qompose_xnnpack.executorch_target.executorch_imports import import_lowering, quiet
from qompose_xnnpack.executorch_target.lowering import lower_methods, lower_to_executorch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.core.toy import Model
from tests.processes import python
from tests.xnnpack.executorch_target.runtime import (
    FULL,
    QD,
    dequantize,
    per_channel,
    quantize,
    through,
    weight_constants,
)

pytest.importorskip("executorch")

IN = (0.021, -7)
OTHER = (0.013, 11)
OUT = (0.05, 5)

Body = Callable[[Any, Tensor, Tensor], Any]


def model(body: Body, weight_shape: tuple[int, ...] = (1,)) -> Model:
    """`body(self, x, y)` over buffers of int8 weights."""
    return Model(body, **{n: nn.Buffer(v) for n, v in weight_constants(1, *weight_shape).items()})


def real_weight(m: Any, zero: Tensor | None = None) -> Tensor:
    zero = m.zero if zero is None else zero
    return per_channel({"weight": m.weight, "scale": m.scale, "zero": zero})


def graph(
    body: Body,
    inputs: tuple[Tensor, Tensor],
    weight: tuple[int, ...] = (1,),
    dynamic_shapes: Any = None,
    claim: Callable[[str], int | None] = lambda name: 1,
) -> GraphModule:
    """Q/DQ graph of ``body`` whose nodes carry the claim ids that ``claim(target)`` names."""
    program = torch.export.export(model(body, weight), inputs, dynamic_shapes=dynamic_shapes)
    module = program.module()
    for node in module.graph.nodes:
        if node.op == "call_function" and (owner := claim(str(node.target))) is not None:
            node.meta["custom"] = {"qompose": {"claim": owner}}
    return module


def images(seed: int = 0, channels: int = 8, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Two images whose values fill the int8 range and leave it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, channels, 9, 10, generator=generator) * 2 for _ in range(2))
    return x, y


def added(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return through(through(x, IN) + through(y, OTHER), OUT)


def two_heads(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    shared = through(x, IN)
    int8 = through(functional.conv2d(shared, real_weight(m), m.bias), OUT)
    return {"int8": int8, "pool": through(functional.avg_pool2d(shared, 3, 1), OUT), "float": y + 1}


def twice(other: tuple[float, int], x: Tensor) -> Any:
    """Read integers with the scale of `0.1` and with another; the integers are its input, or made here."""

    def read(m: Any, x: Tensor) -> Tensor:
        integers = x if x.dtype is torch.int8 else quantize(x, (0.1, 0))
        both = dequantize(integers, (0.1, 0)) + dequantize(integers.detach(), other)
        return through(both, OUT)

    return torch.export.export(Model(read), (x,)).module()


LINE = torch.linspace(-12, 12, 24).view(2, 3, 4)
OWNERS = {"conv2d": 7, "avg_pool2d": 8}
Made = dict[str, tuple[Any, GraphModule]]


@pytest.fixture(scope="module")
def made() -> Made:
    """Methods of one program, and the graphs that they were made of."""
    batch = {0: torch.export.Dim("batch", max=32)}
    heads = graph(
        two_heads, images(), (8, 8, 3, 3), (batch, batch),
        claim=lambda name: next((n for key, n in OWNERS.items() if f".{key}." in name), None),
    )  # fmt: skip
    same = twice((0.1, 0), LINE)
    program = lower_methods(
        {
            "heads": (heads, CallSignature(images(), {}, (batch, batch))),
            "same": (same, CallSignature((LINE,), {}, None)),
        }
    )
    return {"heads": (program.methods["heads"], heads), "same": (program.methods["same"], same)}


@pytest.mark.full
class TestMethods:
    def test_claims_survive_into_the_delegate(self, made: Made) -> None:
        delegation = made["heads"][0].delegation
        found = {op.name: (op.claim, op.int8) for ops in delegation.delegates for op in ops}
        assert found["aten.convolution.default"] == (7, True)
        assert found["aten.avg_pool2d.default"] == (8, False)
        assert delegation.delegated_claims == {7, 8}
        assert delegation.int8_claims == {7}
        assert json.loads(json.dumps(delegation.to_dict()))["int8_claims"] == [7]

    def test_structured_outputs_of_a_batch_up_to_the_declared_bound(self, made: Made) -> None:
        method, module = made["heads"]
        for size in (1, 2, 15, 16, 32):
            inputs = images(3, batch=size)
            actual, expected = method.run(*inputs), module(*inputs)
            assert list(actual) == ["int8", "pool", "float"]
            for name, step in {"int8": OUT[0], "pool": OUT[0], "float": 0.0}.items():
                assert (actual[name] - expected[name]).abs().max().item() <= step * 1.001
        with pytest.raises(ExecutorchTargetError, match="'x' of 'heads'"):
            method.run(*images(batch=33))

    def test_integers_may_be_read_twice_with_one_scale(self, made: Made) -> None:
        method, module = made["same"]
        torch.testing.assert_close(method.run(LINE), module(LINE), atol=OUT[0], rtol=0)

    @pytest.mark.parametrize("overload", ["default", "dtype"])
    def test_embedding_beside_a_delegate(self, overload: str) -> None:
        with quiet():
            import_lowering()  # registers the operators of tables

        def body(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            table, scale = m.weight, m.scale
            args = (table, scale, None, -128, 127, x)
            if overload == "dtype":
                words = QD.embedding_byte.dtype(*args, dtype=torch.float32)
            else:
                words = QD.embedding_byte.default(*args)
            return through(through(words, IN) + through(y, OTHER), OUT), words

        inputs = (torch.tensor([[1, 5], [0, 19]]), torch.randn(2, 2, 6))
        module = graph(body, inputs, (20, 6), claim=lambda name: 3 if "embedding" in name else 4)
        program = lower_to_executorch(module, inputs)
        assert [op.claim for op in program.delegation.portable] == [3]
        assert program.delegation.int8_claims == {3, 4}
        for actual, expected in zip(program.run(*inputs), module(*inputs), strict=True):
            assert (actual - expected).abs().max().item() <= OUT[0] * 1.001


@pytest.fixture(scope="module")
def sums() -> tuple[ExecutorchProgram, GraphModule]:
    """A program for images in channels-last, given by keyword, and its graph."""
    x, y = (image.to(memory_format=torch.channels_last) for image in images())
    module = torch.export.export(model(added), (), {"x": x, "y": y}).module()
    return lower_to_executorch(module, (), {"x": x, "y": y}, load=False), module


class TestProgram:
    def test_memory_formats_keywords_and_wrong_inputs(self, sums: Any) -> None:
        program, module = sums
        plain = dict(zip("xy", images(), strict=True))
        expected = program.run(**plain)
        x, y = (image.to(memory_format=torch.channels_last) for image in images())
        assert torch.equal(program.run(y=y, x=x), expected)
        assert (expected - module(**plain)).abs().max().item() <= OUT[0] * 1.001
        with pytest.raises(TypeError):
            program.run(x, y)
        with pytest.raises(ExecutorchTargetError, match="'x' of 'forward'"):
            program.run(x=x.double(), y=y)

    def test_executorch_itself_runs_a_saved_program(self, sums: Any, tmp_path: Path) -> None:
        from executorch.runtime import Runtime

        path = sums[0].save(tmp_path / "add.pte")
        program = Runtime.get().load_program(
            path
        )  # kept as long as its method, which reads from it
        (actual,) = program.load_method("forward").execute([*images()])
        assert torch.equal(actual, sums[0].run(**dict(zip("xy", images(), strict=True))))

    @pytest.mark.full
    def test_a_saved_program_runs_in_a_process_without_qompose(
        self, sums: Any, tmp_path: Path
    ) -> None:
        expected = sums[0].run(**dict(zip("xy", images(), strict=True)))
        torch.save([*images(), expected], tmp_path / "tensors.pt")
        sums[0].save(tmp_path / "add.pte")
        code = (
            "import sys, torch, executorch.kernels.quantized\n"
            "from executorch.runtime import Runtime\n"
            "x, y, expected = torch.load('tensors.pt')\n"
            "program = Runtime.get().load_program(open('add.pte', 'rb').read())\n"
            "actual = program.load_method('forward').execute([x, y])[0]\n"
            "assert torch.equal(actual, expected) and 'qompose_xnnpack' not in sys.modules\n"
        )
        python("-c", code, cwd=tmp_path, to_the_end=True)


class TestRefusals:
    def test_a_dynamic_dimension_needs_a_bound(self) -> None:
        batch = torch.export.Dim("batch")
        module = graph(lambda m, x, y: x + y, images(), dynamic_shapes=({0: batch}, {0: batch}))
        with pytest.raises(ExecutorchTargetError, match="dynamic"):
            lower_to_executorch(module, images(), dynamic_shapes=({0: batch}, {0: batch}))

    def test_weights_with_zero_points(self) -> None:
        def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
            return through(functional.conv2d(through(x, IN), real_weight(m, m.zero + 3)), OUT)

        with pytest.raises(ExecutorchTargetError, match="dequantize_per_channel"):
            lower_to_executorch(graph(body, images(), (8, 8, 3, 3)), images())

    @pytest.mark.parametrize(("other", "quantized"), [((0.25, 3), False), ((0.1, 1), True)])
    def test_integers_that_are_read_with_two_scales(
        self, other: tuple[float, int], quantized: bool
    ) -> None:
        x = LINE if quantized else LINE.to(torch.int8)
        with pytest.raises(ExecutorchTargetError, match=r"\(0\.1, 0\)"):
            lower_to_executorch(twice(other, x), (x,))

    @pytest.mark.full
    def test_operators_without_a_runtime_kernel(self) -> None:
        def body(m: Any, x: Tensor, y: Tensor) -> Tensor:
            pooled = torch.ops.qompose_xnnpack.max_pool2d(
                quantize(x, IN), [2], [2], [0], [1], False, *FULL
            )
            return dequantize(pooled, IN) + y[:, :, :4, :5]

        with pytest.raises(ExecutorchTargetError, match="qompose_xnnpack::max_pool2d"):
            lower_to_executorch(graph(body, images()), images())

    def test_without_executorch_the_remedy_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = graph(added, images())
        monkeypatch.setitem(sys.modules, "executorch.kernels.quantized", None)
        with pytest.raises(MissingExecutorchError, match=r"qompose-xnnpack\[executorch\]"):
            lower_to_executorch(module, images())

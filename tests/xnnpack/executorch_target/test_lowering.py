# SPDX-License-Identifier: Apache-2.0
"""Q/DQ graphs on the real ExecuTorch runtime, against the kernels of the ``torch`` target."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from qompose_xnnpack import ExecutorchProgram, operators
from qompose_xnnpack.executorch_target import lowering
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError, MissingExecutorchError
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

pytest.importorskip("executorch")

KERNELS = getattr(torch.ops, operators.NAMESPACE)
QD = torch.ops.quantized_decomposed
FULL = (-128, 127)
IN = (0.021, -7)
OTHER = (0.013, 11)
OUT = (0.05, 5)

Body = Callable[..., Any]


def quantize(x: Tensor, scale: float, zp: int) -> Tensor:
    return QD.quantize_per_tensor.default(x, scale, zp, *FULL, torch.int8)


def dequantize(q: Tensor, scale: float, zp: int) -> Tensor:
    return QD.dequantize_per_tensor.default(q, scale, zp, *FULL, torch.int8)


def through(x: Tensor, qparams: tuple[float, int]) -> Tensor:
    return dequantize(quantize(x, *qparams), *qparams)


def per_channel(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return QD.dequantize_per_channel.default(weight, scale, zero, 0, -127, 127, torch.int8)


class Body2(torch.nn.Module):
    """``body(self, x, y)`` over buffers of int8 weights."""

    def __init__(self, body: Body, weight_shape: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        weight = torch.randint(-127, 128, weight_shape, generator=generator, dtype=torch.int8)
        channels = weight_shape[0]
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.rand(channels, generator=generator) * 0.01 + 1e-3)
        self.register_buffer("zero", torch.zeros(channels, dtype=torch.int64))
        self.register_buffer("bias", torch.randn(channels, generator=generator))
        self.body = body

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.body(self, x, y)

    @property
    def real_weight(self) -> Tensor:
        return per_channel(self.weight, self.scale, self.zero)


def graph(
    body: Body,
    inputs: tuple[Tensor, Tensor],
    weight: tuple[int, ...] = (1,),
    dynamic_shapes: Any = None,
    claim: Callable[[str], int | None] = lambda name: 1,
) -> GraphModule:
    """Q/DQ graph of ``body`` whose nodes carry the claim ids that ``claim(target)`` names."""
    model = Body2(body, weight)
    module = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes).module()
    for node in module.graph.nodes:
        if node.op == "call_function" and (owner := claim(str(node.target))) is not None:
            node.meta["custom"] = {"qompose": {"claim": owner}}
    return module


def images(seed: int = 0, channels: int = 8, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Two images whose values fill the int8 range and leave it."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, channels, 9, 10, generator=generator) * 2 for _ in range(2))
    return x, y


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2, 3, 40, generator=torch.Generator().manual_seed(seed)) * 2
    return x, y


def q_in(x: Tensor) -> tuple[Any, ...]:
    return (quantize(x, *IN), *IN)


def q_other(y: Tensor) -> tuple[Any, ...]:
    return (quantize(y, *OTHER), *OTHER)


@dataclass(frozen=True)
class Case:
    """``body`` as a Q/DQ graph, ``kernel`` for the same in int8, and what becomes of it."""

    body: Body
    kernel: Callable[[Body2, Tensor, Tensor], Tensor]
    inputs: Callable[..., tuple[Tensor, Tensor]] = images
    weight: tuple[int, ...] = (1,)
    int8: bool = True
    out: tuple[float, int] = OUT
    portable: tuple[str, ...] = field(default=())


def conv(
    weight: tuple[int, ...], stride: int, padding: int, dilation: int, groups: int, relu: bool
) -> Case:
    geometry = (stride, padding, dilation, groups)
    lists = ([stride], [padding], [dilation], groups)

    def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        result = functional.conv2d(through(x, IN), m.real_weight, m.bias, *geometry)
        return through(torch.relu(result) if relu else result, OUT)

    def kernel(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        low = OUT[1] if relu else -128
        return KERNELS.conv2d(*q_in(x), m.weight, m.scale, m.bias, *lists, *OUT, low, 127)

    return Case(body, kernel, weight=weight)


def linear(relu: bool, bias: bool) -> Case:
    def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        result = functional.linear(through(x, IN), m.real_weight, m.bias if bias else None)
        return through(torch.relu(result) if relu else result, OUT)

    def kernel(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        constants = (m.weight, m.scale, m.bias if bias else None)
        return KERNELS.linear(*q_in(x), *constants, *OUT, OUT[1] if relu else -128, 127)

    return Case(body, kernel, inputs=rows, weight=(24, 40))


def linear_per_tensor() -> Case:
    def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        weight = QD.dequantize_per_tensor.default(m.weight, 0.004, 0, -127, 127, torch.int8)
        return through(functional.linear(through(x, IN), weight, m.bias), OUT)

    def kernel(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        return KERNELS.linear(*q_in(x), m.weight, torch.tensor([0.004]), m.bias, *OUT, *FULL)

    return Case(body, kernel, inputs=rows, weight=(24, 40))


def pair(name: str, relu: bool, int8: bool = True) -> Case:
    function = {"add": torch.add, "mul": torch.mul}[name]

    def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        result = function(through(x, IN), through(y, OTHER))
        return through(torch.relu(result) if relu else result, OUT)

    def kernel(m: Body2, x: Tensor, y: Tensor) -> Tensor:
        low = OUT[1] if relu else -128
        return getattr(KERNELS, name)(*q_in(x), *q_other(y), *OUT, low, 127)

    return Case(body, kernel, int8=int8)


def pool(function: Body, name: str, *args: Any, portable: str = "", int8: bool = False) -> Case:
    return Case(
        lambda m, x, y: through(function(through(x, IN)), OUT),
        lambda m, x, y: getattr(KERNELS, name)(*q_in(x), *args, *OUT, *FULL),
        int8=int8,
        portable=(portable,) if portable else (),
    )


CASES: dict[str, Case] = {
    "linear": linear(relu=False, bias=True),
    "linear relu": linear(relu=True, bias=True),
    "linear without bias": linear(relu=False, bias=False),
    "linear per tensor": linear_per_tensor(),
    "conv": conv((16, 8, 3, 3), 1, 1, 1, 1, relu=False),
    "conv relu, stride": conv((16, 8, 3, 3), 2, 1, 1, 1, relu=True),
    "conv, depthwise": conv((8, 1, 3, 3), 1, 1, 1, 8, relu=True),
    "conv, grouped and dilated": conv((16, 4, 3, 3), 2, 3, 2, 2, relu=False),
    "conv, one pixel": conv((16, 8, 1, 1), 1, 0, 1, 1, relu=True),
    "add": pair("add", relu=False),
    "add relu": pair("add", relu=True),
    "mul": pair("mul", relu=False),
    # XNNPACK's partitioner fuses no relu behind a product, and computes both in float.
    "mul relu": pair("mul", relu=True, int8=False),
    "mean": pool(lambda x: x.mean([2, 3], True), "mean", [2, 3], True, int8=True),
    "mean, axes dropped": pool(
        lambda x: x.mean([2, 3]), "mean", [2, 3], False, portable="aten.mean.dim"
    ),
    "global average": pool(
        lambda x: functional.adaptive_avg_pool2d(x, 1), "adaptive_avg_pool2d", [1, 1], int8=True
    ),
    "avg pool": pool(
        lambda x: functional.avg_pool2d(x, 3, 2), "avg_pool2d",
        [3], [2], [0], False, True, None,
    ),
    "avg pool, padding counted": pool(
        lambda x: functional.avg_pool2d(x, 3, 2, 1), "avg_pool2d",
        [3], [2], [1], False, True, None, portable="aten.avg_pool2d.default",
    ),
    "max pool": Case(
        lambda m, x, y: through(functional.max_pool2d(through(x, OUT), 3, 2, 1), OUT),
        lambda m, x, y: KERNELS.max_pool2d(
            quantize(x, *OUT), [3], [2], [1], [1], False, *FULL
        ),
    ),
}  # fmt: skip


class TestAgreement:
    @pytest.mark.parametrize("name", CASES)
    def test_runtime_and_kernels_agree(self, name: str) -> None:
        case = CASES[name]
        inputs = case.inputs()
        # An input that a graph does not use would keep it from being one delegate.
        program = lower_to_executorch(graph(case.body, inputs, case.weight), inputs)
        model = Body2(case.body, case.weight)
        exact = True
        for seed in range(4):
            x, y = case.inputs(seed)
            actual = quantize(program.run(x, y), *case.out).int()
            difference = (actual - case.kernel(model, x, y).int()).abs().max().item()
            assert difference <= 1
            exact = exact and difference == 0
        delegation = program.delegation
        assert tuple(op.name for op in delegation.portable) == case.portable
        assert delegation.delegated_claims == (set() if case.portable else {1})
        assert delegation.int8_claims == ({1} if case.int8 else set())
        assert exact or not case.int8, "int8 kernels were seen to agree bit for bit"


def two_heads(m: Body2, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    shared = through(x, IN)
    int8 = through(functional.conv2d(shared, m.real_weight, m.bias), OUT)
    return {"int8": int8, "pool": through(functional.avg_pool2d(shared, 3, 1), OUT), "float": y + 1}


class TestDelegation:
    def test_claims_survive_into_the_delegate(self) -> None:
        owners = {"conv2d": 7, "avg_pool2d": 8}
        module = graph(
            two_heads, images(), (8, 8, 3, 3),
            claim=lambda name: next((n for key, n in owners.items() if f".{key}." in name), None),
        )  # fmt: skip
        delegation = lower_to_executorch(module, images()).delegation
        found = {op.name: (op.claim, op.int8) for ops in delegation.delegates for op in ops}
        assert found["aten.convolution.default"] == (7, True)
        assert found["aten.avg_pool2d.default"] == (8, False)
        assert delegation.delegated_claims == {7, 8}
        assert delegation.int8_claims == {7}
        assert json.loads(json.dumps(delegation.to_dict()))["int8_claims"] == [7]

    def test_structured_outputs_and_a_shared_dequantize(self) -> None:
        module = graph(two_heads, images(), (8, 8, 3, 3))
        actual = lower_to_executorch(module, images()).run(*images(3))
        expected = module(*images(3))
        assert list(actual) == ["int8", "pool", "float"]
        for name, step in {"int8": OUT[0], "pool": OUT[0], "float": 0.0}.items():
            assert (actual[name] - expected[name]).abs().max().item() <= step * 1.001

    @pytest.mark.parametrize("users", ["one", "two"])
    def test_a_convolution_that_xnnpack_refuses_is_still_right(self, users: str) -> None:
        def body(m: Body2, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            result = functional.conv2d(through(x, IN), m.real_weight, m.bias)
            head = through(torch.sigmoid(result), (1 / 256, -128))
            return (head,) if users == "one" else (head, through(result, OUT))

        module = graph(body, images(), (8, 8, 3, 3))
        program = lower_to_executorch(module, images())
        assert [op.name for op in program.delegation.portable] == ["aten.convolution.default"]
        assert program.delegation.int8_claims == frozenset()
        for actual, expected in zip(program.run(*images()), module(*images()), strict=True):
            assert (actual - expected).abs().max().item() <= 1.001 * OUT[0]

    @pytest.mark.parametrize("overload", ["default", "dtype"])
    def test_embedding_beside_a_delegate(self, overload: str) -> None:
        def body(m: Body2, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
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


class TestProgram:
    def test_dynamic_batch_reaches_the_declared_bound(self) -> None:
        batch = torch.export.Dim("batch", max=32)
        shapes = ({0: batch}, {0: batch})
        module = graph(two_heads, images(), (8, 8, 3, 3), dynamic_shapes=shapes)
        program = lower_to_executorch(module, images(), dynamic_shapes=shapes)
        for size in (1, 2, 15, 16, 32):
            inputs = images(batch=size)
            difference = program.run(*inputs)["int8"] - module(*inputs)["int8"]
            assert difference.abs().max().item() <= OUT[0] * 1.001
        with pytest.raises(
            ExecutorchTargetError, match=r"input 'x' of 'forward'.* got .*\(33, 8, 9, 10\)"
        ):
            program.run(*images(batch=33))

    def test_a_dynamic_dimension_needs_a_bound(self) -> None:
        batch = torch.export.Dim("batch")
        module = graph(lambda m, x, y: x + y, images(), dynamic_shapes=({0: batch}, {0: batch}))
        with pytest.raises(ExecutorchTargetError, match="no upper bound"):
            lower_to_executorch(module, images(), dynamic_shapes=({0: batch}, {0: batch}))

    def test_memory_formats_keywords_and_wrong_inputs(self) -> None:
        x, y = (image.to(memory_format=torch.channels_last) for image in images())
        keywords = {"x": x, "y": y}
        module = torch.export.export(Body2(CASES["add"].body, (1,)), (), keywords).module()
        program = lower_to_executorch(module, (), keywords)
        plain = program.run(x=x.contiguous(), y=y.contiguous())
        assert torch.equal(program.run(y=y, x=x), plain)
        assert (plain - module(x=x, y=y)).abs().max().item() <= OUT[0] * 1.001
        with pytest.raises(TypeError, match="inputs of structure"):
            program.run(x, y)
        with pytest.raises(ExecutorchTargetError, match=r"input 'x' of 'forward'.* got a float64"):
            program.run(x=x.double(), y=y)

    def test_outputs_are_not_overwritten(self) -> None:
        program = lower_to_executorch(graph(CASES["add"].body, images()), images())
        first = program.run(*images(1))
        kept = first.clone()
        program.run(*images(2))
        assert torch.equal(first, kept)

    def test_collection_copies_and_files(self, tmp_path: Path) -> None:
        program = lower_to_executorch(graph(CASES["add"].body, images()), images(), load=False)
        expected = copy.deepcopy(program).run(*images())
        method = program.methods["forward"]
        gc.freeze()  # what stood before is not looked at twenty times
        for _ in range(20):
            parts = {"forward": (method.interface, method.delegation)}
            fresh = ExecutorchProgram(program.buffer[:], parts)
            output = fresh.run(*images())
            del fresh
            gc.collect()
            assert torch.equal(output, expected)
        gc.unfreeze()
        path = program.save(tmp_path / "add.pte")
        assert path.read_bytes() == program.buffer

    def test_a_saved_program_runs_in_a_process_without_qompose(self, tmp_path: Path) -> None:
        program = lower_to_executorch(graph(CASES["add"].body, images()), images())
        torch.save([*images(), program.run(*images())], tmp_path / "tensors.pt")
        program.save(tmp_path / "add.pte")
        code = (
            "import sys, torch, executorch.kernels.quantized\n"
            "from executorch.runtime import Runtime\n"
            "x, y, expected = torch.load('tensors.pt')\n"
            "program = Runtime.get().load_program(open('add.pte', 'rb').read())\n"
            "actual = program.load_method('forward').execute([x, y])[0]\n"
            "assert torch.equal(actual, expected) and 'qompose_xnnpack' not in sys.modules\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


class TestRefusals:
    def test_weights_with_zero_points(self) -> None:
        def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
            weight = per_channel(m.weight, m.scale, m.zero + 3)
            return through(functional.conv2d(through(x, IN), weight), OUT)

        with pytest.raises(ExecutorchTargetError, match=r"dequantize_per_channel.*symmetrically"):
            lower_to_executorch(graph(body, images(), (8, 8, 3, 3)), images())

    @pytest.mark.parametrize("quantized", [False, True])
    @pytest.mark.parametrize("other", [(0.25, 3), (0.1, 1), (0.1, 0)])
    def test_integers_that_are_read_with_two_scales(
        self, other: tuple[float, int], quantized: bool
    ) -> None:
        class Twice(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                integers = quantize(x, 0.1, 0) if quantized else x
                both = dequantize(integers, 0.1, 0) + dequantize(integers.detach(), *other)
                return through(both, OUT)

        x = torch.linspace(-12, 12, 24).view(2, 3, 4)
        inputs = (x if quantized else x.to(torch.int8),)
        model = torch.export.export(Twice(), inputs).module()
        if other == (0.1, 0):
            actual = lower_to_executorch(model, inputs).run(*inputs)
            torch.testing.assert_close(actual, model(*inputs), atol=OUT[0], rtol=0)
        else:
            with pytest.raises(
                ExecutorchTargetError, match=r"integers of .*\(0\.1, 0\) in .*XNNPACK"
            ):
                lower_to_executorch(model, inputs)

    def test_uint8_activations_fail_at_load(self) -> None:
        def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
            args = (0.02, 128, 0, 255, torch.uint8)
            for step in (torch.relu, torch.relu):
                q = QD.quantize_per_tensor.default(x, *args)
                x = step(QD.dequantize_per_tensor.default(q, *args))
            return x + y

        with pytest.raises(ExecutorchTargetError, match="runtime cannot load"):
            lower_to_executorch(graph(body, images()), images())

    def test_operators_without_a_runtime_kernel(self) -> None:
        def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
            pooled = KERNELS.max_pool2d(quantize(x, *IN), [2], [2], [0], [1], False, *FULL)
            return dequantize(pooled, *IN) + y[:, :, :4, :5]

        with pytest.raises(ExecutorchTargetError, match="qompose_xnnpack::max_pool2d"):
            lower_to_executorch(graph(body, images()), images())

    def test_without_executorch_the_remedy_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = graph(CASES["add"].body, images())
        monkeypatch.setitem(sys.modules, "executorch.kernels.quantized", None)
        with pytest.raises(MissingExecutorchError, match=r'pip install "qompose-xnnpack\[exec'):
            lower_to_executorch(module, images())

    def test_importing_the_module_does_not_import_executorch(self) -> None:
        name = lowering.__name__
        code = f"import sys, {name}; sys.exit('executorch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0

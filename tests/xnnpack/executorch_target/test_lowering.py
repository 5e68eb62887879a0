# SPDX-License-Identifier: Apache-2.0
"""Q/DQ graphs on the real ExecuTorch runtime, against the kernels of the ``torch`` target."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError, MissingExecutorchError
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import functional

pytest.importorskip("executorch")

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


def added(m: Body2, x: Tensor, y: Tensor) -> Tensor:
    return through(through(x, IN) + through(y, OTHER), OUT)


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

    @pytest.mark.parametrize("overload", ["default", pytest.param("dtype", marks=pytest.mark.full)])
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
        with pytest.raises(ExecutorchTargetError, match="'x' of 'forward'"):
            program.run(*images(batch=33))

    def test_a_dynamic_dimension_needs_a_bound(self) -> None:
        batch = torch.export.Dim("batch")
        module = graph(lambda m, x, y: x + y, images(), dynamic_shapes=({0: batch}, {0: batch}))
        with pytest.raises(ExecutorchTargetError, match="dynamic"):
            lower_to_executorch(module, images(), dynamic_shapes=({0: batch}, {0: batch}))

    def test_memory_formats_keywords_and_wrong_inputs(self) -> None:
        x, y = (image.to(memory_format=torch.channels_last) for image in images())
        keywords = {"x": x, "y": y}
        module = torch.export.export(Body2(added, (1,)), (), keywords).module()
        program = lower_to_executorch(module, (), keywords)
        plain = program.run(x=x.contiguous(), y=y.contiguous())
        assert torch.equal(program.run(y=y, x=x), plain)
        assert (plain - module(x=x, y=y)).abs().max().item() <= OUT[0] * 1.001
        with pytest.raises(TypeError):
            program.run(x, y)
        with pytest.raises(ExecutorchTargetError, match="'x' of 'forward'"):
            program.run(x=x.double(), y=y)

    def test_collection_copies_and_files(self, tmp_path: Path) -> None:
        program = lower_to_executorch(graph(added, images()), images(), load=False)
        expected = copy.deepcopy(program).run(*images())
        method = program.methods["forward"]
        gc.freeze()  # what stood before is not looked at each time
        for _ in range(5):
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
        program = lower_to_executorch(graph(added, images()), images())
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

        with pytest.raises(ExecutorchTargetError, match="dequantize_per_channel"):
            lower_to_executorch(graph(body, images(), (8, 8, 3, 3)), images())

    @pytest.mark.parametrize(
        ("other", "quantized"), [((0.25, 3), False), ((0.1, 1), True), ((0.1, 0), True)]
    )
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
            with pytest.raises(ExecutorchTargetError, match=r"\(0\.1, 0\)"):
                lower_to_executorch(model, inputs)

    def test_operators_without_a_runtime_kernel(self) -> None:
        def body(m: Body2, x: Tensor, y: Tensor) -> Tensor:
            pooled = torch.ops.qompose_xnnpack.max_pool2d(
                quantize(x, *IN), [2], [2], [0], [1], False, *FULL
            )
            return dequantize(pooled, *IN) + y[:, :, :4, :5]

        with pytest.raises(ExecutorchTargetError, match="qompose_xnnpack::max_pool2d"):
            lower_to_executorch(graph(body, images()), images())

    def test_without_executorch_the_remedy_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = graph(added, images())
        monkeypatch.setitem(sys.modules, "executorch.kernels.quantized", None)
        with pytest.raises(MissingExecutorchError, match=r"qompose-xnnpack\[executorch\]"):
            lower_to_executorch(module, images())

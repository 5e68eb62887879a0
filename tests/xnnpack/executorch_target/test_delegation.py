# SPDX-License-Identifier: Apache-2.0
"""What became of every operator, with reasons; what goes astray; and how reports tell it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch

# Registers the quantized_decomposed operators.
import torch.ao.quantization.fx._decomposed
from qompose.backend import CallSignature
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.delegation import Delegation, Operator, Stray
from qompose_xnnpack.executorch_target.lowering import lower_methods, lower_to_executorch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.logs import Listen
from tests.sampling import at_once

pytest.importorskip("executorch")

QD = torch.ops.quantized_decomposed
X, Y = torch.randn(2, 1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
A, B = (0.03, 3, -128, 127, torch.int8), (0.05, -2, -128, 127, torch.int8)
UINT8 = (0.03, 128, 0, 255, torch.uint8)


def q(x: Tensor, form: Any = A) -> Tensor:
    return QD.quantize_per_tensor.default(x, *form)


def dq(x: Tensor, form: Any = A) -> Tensor:
    return QD.dequantize_per_tensor.default(x, *form)


def through(x: Tensor, form: Any = A) -> Tensor:
    return dq(q(x, form), form)


class Of(nn.Module):
    """A function of two images, with a convolution at hand whose weight is int8."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        weight = torch.randint(-127, 128, (4, 4, 1, 1), generator=torch.Generator().manual_seed(1))
        self.register_buffer("weight", weight.to(torch.int8))

    def conv(self, x: Tensor) -> Tensor:
        return functional.conv2d(
            x, QD.dequantize_per_tensor.default(self.weight, 0.01, 0, -127, 127, torch.int8)
        )

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x, y)


def graph_of(function: Callable[..., Any]) -> GraphModule:
    module = torch.export.export(Of(function), (X, Y)).module()
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {"qompose": {"claim": 1, "operator": node.name}}
    return module


def program_of(function: Callable[..., Any]) -> ExecutorchProgram:
    return lower_to_executorch(graph_of(function), (X, Y))


def conv_of_float(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return m.conv(x) + y


def conv_into_float(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(m.conv(through(x))) + y


def conv_read_twice(m: Of, x: Tensor, y: Tensor) -> Tensor:
    result = m.conv(through(x))
    return through(result, B) + through(torch.sigmoid(result)) + y


def computed_weight(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return functional.conv2d(through(x), y[0, :, :1, :1].reshape(1, 4, 1, 1))


def padded_average(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return through(functional.avg_pool2d(through(x), 3, 2, 1), B) + y[..., :3, :3]


def branches(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda z: z.sigmoid(), lambda z: z + 1, (y,))


REASONS: dict[str, tuple[Callable[..., Any], str]] = {
    "no such operator": (lambda m, x, y: torch.erf(x) + y, "aten.erf"),
    "result is float": (conv_into_float, "aten.convolution"),
    "input is float": (conv_of_float, "aten.convolution"),
    "several readers": (conv_read_twice, "aten.convolution"),
    "computed weight": (computed_weight, "aten.convolution"),
    "in its own words": (padded_average, "aten.avg_pool2d"),
    "types": (lambda m, x, y: (x > 0).int() + 1, "aten.add"),
    "in a body": (branches, "aten.sigmoid"),
}


def rounded_twice(m: Of, x: Tensor, y: Tensor) -> Tensor:
    return torch.erf(through(torch.ops.aten.alias(through(torch.erf(x))))) + y


def aliased(m: Of, x: Tensor, y: Tensor) -> Tensor:
    z = through(through(x) + through(y), B)
    return through(torch.ops.aten.alias(z) + through(y), B)


def reshaped(m: Of, x: Tensor, y: Tensor) -> Tensor:
    z = through(through(x) + through(y), B)
    z = through(z.transpose(1, 2), B)
    return through(z.reshape(1, 6, 24), B)


# what stands beside delegates, the strays in it, and whether the quantized part is whole
STRAYS: dict[str, tuple[Callable[..., Any], list[tuple[str, str]], bool]] = {
    "input and output": (lambda m, x, y: through(through(x) + through(y), B), [], True),
    "beside a portable operator": (
        lambda m, x, y: through(through(torch.erf(x)) + through(y), B), [], False,
    ),
    "for a portable convolution, but not of its weight": (
        conv_into_float, [("quantize", "x"), ("dequantize", "x")], False,
    ),
    "between two delegates": (
        lambda m, x, y: through(x * y, UINT8) - y,
        [("quantize", "aten_mul_tensor"), ("dequantize", "aten_mul_tensor")], False,
    ),
    "rounding between portable operators, through an alias": (
        rounded_twice, [("quantize", "aten_erf_default"), ("dequantize", "aten_erf_default")], False,
    ),
    "inputs read by two delegates": (
        lambda m, x, y: through(torch.erf(through(through(x) + through(y), B)), A) + through(x),
        [],
        False,
    ),
    "an alias between": (aliased, [], True),
    "a reshape behind a transpose": (reshaped, [], True),
}  # fmt: skip


AT_ONCE = (
    *("between two delegates", "inputs read by two delegates", "an alias between"),
    *("for a portable convolution, but not of its weight", "a reshape behind a transpose"),
    "rounding between portable operators, through an alias",
)


@cache
def methods(at_once: bool) -> dict[str, Any]:
    """By name in both tables, its method of a program that has them all."""
    rows = {**REASONS, **STRAYS}
    graphs = {name: graph_of(rows[name][0]) for name in rows if (name in AT_ONCE) == at_once}
    signature = CallSignature((X, Y), {}, None)
    names = {name: re.sub(r"\W", "_", name) for name in graphs}
    made = lower_methods({names[name]: (graph, signature) for name, graph in graphs.items()})
    return {name: made.methods[names[name]] for name in graphs}


def method(name: str) -> Any:
    return methods(name in AT_ONCE)[name]


class TestReasons:
    @pytest.mark.full
    def test_portable_operators_have_one_of_their_own(self) -> None:
        found = {}
        for name in REASONS:
            operator, delegation = REASONS[name][1], method(name).delegation
            reasons = {op.name.rpartition(".")[0]: op.reason for op in delegation.portable}
            assert all(reasons.values())
            assert not any(op.reason for ops in delegation.delegates for op in ops)
            assert f"portable: {operator}" in str(delegation)
            found[name] = reasons[operator]
        assert len(set(found.values())) == len(REASONS), found

    @pytest.mark.full
    def test_a_size_that_is_computed_is_no_type(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 2)).eval()
        batch, x = torch.export.Dim("batch", min=2, max=8), torch.randn(2, 3, 6, 6)
        program = qompose.quantize(
            torch.export.export(model, (x,), dynamic_shapes=({0: batch},)),
            backends="xnnpack",
            calibration=[x],
            target="executorch",
        ).model
        reasons = {op.name.rpartition(".")[0]: op.reason for op in program.delegation.portable}
        assert "run time" in reasons["aten.view_copy"]

    @pytest.mark.full
    def test_collecting_them_leaves_logging_alone(self, logged: Listen) -> None:
        names = [n for n in logging.root.manager.loggerDict if "xnnpack" in n]
        before = [(n, logging.getLogger(n).level, logging.getLogger(n).handlers[:]) for n in names]
        heard = logged(logging.INFO)
        program_of(conv_of_float)
        assert not [record for record in heard.records if "xnnpack" in record.name]
        after = [(n, logging.getLogger(n).level, logging.getLogger(n).handlers[:]) for n in names]
        assert before == after
        from executorch.backends.xnnpack.partition.config import gemm_configs

        assert isinstance(gemm_configs.why.logger, logging.Logger)

    @pytest.mark.full
    def test_a_user_who_asks_executorch_still_hears_it(self, logged: Listen) -> None:
        heard = logged(logging.DEBUG, "executorch.backends.xnnpack.partition.config")
        program_of(conv_of_float)
        assert "was not partitioned because" in heard.text


class TestStrays:
    @pytest.mark.parametrize("name", at_once(STRAYS, *AT_ONCE))
    def test_what_is_no_boundary_is_stray(self, name: str) -> None:
        function, strays, whole = STRAYS[name]
        found = method(name).delegation.strays
        assert [(s.name.split(".")[1].partition("_")[0], s.reads) for s in found] == strays
        assert method(name).delegation.whole == whole
        actual, expected = method(name).run(X, Y), graph_of(function)(X, Y)
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(actual), leaves(expected), strict=True):
            assert (one - other).abs().max().item() <= 1.001 * B[0]

    def test_between_delegates_the_partitioner_says_why(self) -> None:
        delegation = method("between two delegates").delegation
        assert {stray.reason for stray in delegation.strays} == {"invalid dtype"}
        assert "from aten_mul_tensor to aten_sub_tensor" in str(delegation)


class TestMendings:
    def test_an_alias_does_not_cut_a_delegate_in_two(self) -> None:
        delegation = method("an alias between").delegation
        assert len(delegation.delegates) == 1 and not delegation.portable

    def test_a_reshape_behind_a_transpose_computes_on_integers(self) -> None:
        delegation = method("a reshape behind a transpose").delegation
        assert [op.name for op in delegation.operators if not op.int8] == []
        assert delegation.int8_claims == {1}

    def test_an_alias_between_equal_pairs_leaves_one(self) -> None:
        """Two strays, which the test above counts: they round, and are needed for that."""
        rounded = method("rounding between portable operators, through an alias")
        assert torch.allclose(rounded.run(X, Y), graph_of(rounded_twice)(X, Y), atol=A[0] * 1.001)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.norm = nn.Conv2d(4, 4, 3), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.adaptive_avg_pool2d(self.conv(x).relu(), 1).flatten(1)
        return self.norm(self.head(pooled).softmax(-1)) / 2


@pytest.fixture(scope="module")
def lowered() -> ExecutorchProgram:
    torch.manual_seed(0)
    exported = torch.export.export(Net().eval(), (X,))
    prepared = qompose.prepare_pt2e(exported, qompose.compose("xnnpack"))
    qompose.calibrate(prepared, [(X,), (Y,)])
    program: ExecutorchProgram = qompose.lower(qompose.convert_pt2e(prepared), "executorch")
    return program


class TestReport:
    def test_float_operators_say_what_they_became(self, lowered: ExecutorchProgram) -> None:
        rows = {row.name: row for row in qompose.report(lowered).rows}
        assert rows["softmax"].state == rows["layer_norm"].state == "float"
        assert "delegate" in rows["softmax"].explanation
        assert "aten.native_layer_norm.default" in rows["layer_norm"].explanation
        assert rows["conv2d"].state == "int8 kernel"
        assert "int8" in lowered.delegation.remarks()["conv2d"]

    def test_every_operator_is_accounted_for(self, lowered: ExecutorchProgram) -> None:
        known = lowered.delegation.remarks()
        for row in qompose.report(lowered).rows:
            assert row.name in known or row.explanation


OPERATOR = Operator(
    name="aten.erf.default", claim=None, int8=False, module="head", reason="of this"
)


class TestData:
    @pytest.mark.parametrize("name", AT_ONCE[::3])
    def test_json_and_back(self, name: str) -> None:
        delegation = method(name).delegation
        data = json.loads(json.dumps(delegation.to_dict()))
        assert Delegation.from_dict(data) == delegation
        assert data["whole"] is False

    def test_text(self) -> None:
        stray = Stray(name="q", module="m", reads="a", readers=("b", "c"))
        delegation = Delegation(delegates=((),), portable=(OPERATOR,), strays=(stray,))
        assert [line.partition(":")[0] for line in str(delegation).splitlines()[1:]] == [
            *("delegate 0", "portable", "stray")
        ]

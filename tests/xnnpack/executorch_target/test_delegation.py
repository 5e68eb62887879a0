# SPDX-License-Identifier: Apache-2.0
"""What became of every operator, with reasons; what goes astray; and how reports tell it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import CallSignature
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.delegation import Delegation, Operator, Stray
from qompose_xnnpack.executorch_target.lowering import lower_methods, lower_to_executorch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from tests.core.toy import Model
from tests.logs import Listen
from tests.sampling import at_once
from tests.xnnpack.executorch_target.delegates import floats_between, handed_over
from tests.xnnpack.executorch_target.runtime import QD, converted, through

pytest.importorskip("executorch")

X, Y = torch.randn(2, 1, 4, 6, 6, generator=torch.Generator().manual_seed(0))
A, B = (0.03, 3), (0.05, -2)
WEIGHT = torch.randint(-127, 128, (4, 4, 1, 1), generator=torch.Generator().manual_seed(1))
Function = Callable[[Any, Tensor, Tensor], Any]


def graph_of(function: Function) -> GraphModule:
    """Of a function of two images, with an int8 weight of a convolution at hand."""
    model = Model(function, weight=nn.Buffer(WEIGHT.to(torch.int8)))
    module = torch.export.export(model, (X, Y)).module()
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {"qompose": {"claim": 1, "operator": node.name}}
    return module


def program_of(function: Function) -> ExecutorchProgram:
    return lower_to_executorch(graph_of(function), (X, Y))


def conv(m: Any, x: Tensor) -> Tensor:
    weight = QD.dequantize_per_tensor.default(m.weight, 0.01, 0, -127, 127, torch.int8)
    return functional.conv2d(x, weight)


def conv_of_float(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return conv(m, x) + y


def conv_into_float(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(conv(m, through(x, A))) + y


def conv_read_twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    result = conv(m, through(x, A))
    return through(result, B) + through(torch.sigmoid(result), A) + y


REASONS: dict[str, tuple[Function, str]] = {
    "no such operator": (lambda m, x, y: torch.erf(x) + y, "aten.erf"),
    "result is float": (conv_into_float, "aten.convolution"),
    "input is float": (conv_of_float, "aten.convolution"),
    "several readers": (conv_read_twice, "aten.convolution"),
    "computed weight": (
        lambda m, x, y: functional.conv2d(through(x, A), y[0, :, :1, :1].reshape(1, 4, 1, 1)),
        "aten.convolution",
    ),
    "in its own words": (
        lambda m, x, y: through(functional.avg_pool2d(through(x, A), 3, 2, 1), B) + y[..., :3, :3],
        "aten.avg_pool2d",
    ),
    "types": (lambda m, x, y: (x > 0).int() + 1, "aten.add"),
    "in a body": (
        lambda m, x, y: torch.cond(x.sum() > 0, lambda z: z.sigmoid(), lambda z: z + 1, (y,)),
        "aten.sigmoid",
    ),
}  # fmt: skip


def in_bytes(m: Any, x: Tensor, y: Tensor) -> Tensor:
    form = (0.03, 128, 0, 255, torch.uint8)
    integers = QD.quantize_per_tensor.default(x * y, *form)
    return QD.dequantize_per_tensor.default(integers, *form) - y


def rounded_twice(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.erf(through(torch.ops.aten.alias(through(torch.erf(x), A)), A)) + y


def aliased(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = through(through(x, A) + through(y, A), B)
    return through(torch.ops.aten.alias(z) + through(y, A), B)


def reshaped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = through(through(x, A) + through(y, A), B)
    z = through(z.transpose(1, 2), B)
    return through(z.reshape(1, 6, 24), B)


# what stands beside delegates, the strays in it, and whether the quantized part is whole
STRAYS: dict[str, tuple[Function, list[tuple[str, str]], bool]] = {
    "input and output": (lambda m, x, y: through(through(x, A) + through(y, A), B), [], True),
    "beside a portable operator": (
        lambda m, x, y: through(through(torch.erf(x), A) + through(y, A), B), [], False,
    ),
    "for a portable convolution, but not of its weight": (
        conv_into_float, [("quantize", "x"), ("dequantize", "x")], False,
    ),
    "between two delegates": (
        in_bytes,
        [("quantize", "aten_mul_tensor"), ("dequantize", "aten_mul_tensor")], False,
    ),
    "rounding between portable operators, through an alias": (
        rounded_twice, [("quantize", "aten_erf_default"), ("dequantize", "aten_erf_default")], False,
    ),
    "inputs read by two delegates": (
        lambda m, x, y: through(torch.erf(through(through(x, A) + through(y, A), B)), A) + through(x, A),
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
    names = {f"method{number}": name for number, name in enumerate(graphs)}
    made = lower_methods({each: (graphs[name], signature) for each, name in names.items()})
    return {name: made.methods[each] for each, name in names.items()}


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
        step = A[0] if function is rounded_twice else B[0]
        leaves = torch.utils._pytree.tree_leaves
        for one, other in zip(leaves(actual), leaves(expected), strict=True):
            assert (one - other).abs().max().item() <= 1.001 * step

    def test_between_delegates_the_partitioner_says_why(self) -> None:
        delegation = method("between two delegates").delegation
        assert {stray.reason for stray in delegation.strays} == {"invalid dtype"}
        assert "from aten_mul_tensor to aten_sub_tensor" in str(delegation)


class TestMendings:
    def test_an_alias_does_not_cut_a_delegate_in_two(self) -> None:
        delegation = method("an alias between").delegation
        assert len(delegation.delegates) == 1 and not delegation.portable

    def test_a_batch_norm_behind_a_transposed_convolution_with_groups(self) -> None:
        """Together they end ExecuTorch's export, which takes the weight for one without groups."""
        model = nn.Sequential(
            *(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
            *(nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d(4)),
        ).eval()
        for norm in (model[1], model[3]):
            norm.running_mean.uniform_(-1, 1)
        program = lower_to_executorch(torch.export.export(model, (X,)).module(), (X,))
        torch.testing.assert_close(program.run(X), model(X), rtol=1e-4, atol=1e-5)
        (left,) = program.delegation.portable
        assert left.module == "1" and left.reason

    def test_a_reshape_behind_a_transpose_computes_on_integers(self) -> None:
        delegation = method("a reshape behind a transpose").delegation
        assert [op.name for op in delegation.operators if not op.int8] == []
        assert delegation.int8_claims == {1}


def net(m: Any, x: Tensor) -> Tensor:
    pooled = functional.adaptive_avg_pool2d(m.conv(x).relu(), 1).flatten(1)
    return m.norm(m.head(pooled).softmax(-1)) / 2


@pytest.fixture(scope="module")
def lowered() -> Any:
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(4, 4, 3), "head": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    return qompose.lower(converted(Model(net, **layers), X, Y), "executorch")


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


def test_floats_between_integers_are_seen() -> None:
    """XNNPACK has one of these functions, the pool, for integers."""
    with handed_over() as graphs:
        program_of(
            lambda m, x, y: (
                through(functional.gelu(through(x, A)).tanh(), A),
                through(functional.max_pool2d(through(x, A), 2), A) + y[..., :3, :3],
            )
        )
    found = [name for graph in graphs for name in floats_between(graph)]
    assert [name for name in found if name not in ("XNNStaticTranspose", "XNNCopy")] == [
        *("XNNGelu", "XNNTanh")
    ]


class TestData:
    @pytest.mark.parametrize("name", AT_ONCE[::3])
    def test_json_and_back(self, name: str) -> None:
        delegation = method(name).delegation
        data = json.loads(json.dumps(delegation.to_dict()))
        assert Delegation.from_dict(data) == delegation
        assert data["whole"] is False

    def test_text(self) -> None:
        operator = Operator(
            name="aten.erf.default", claim=None, int8=False, module="head", reason="of this"
        )
        stray = Stray(name="q", module="m", reads="a", readers=("b", "c"))
        delegation = Delegation(delegates=((),), portable=(operator,), strays=(stray,))
        assert [line.partition(":")[0] for line in str(delegation).splitlines()[1:]] == [
            *("delegate 0", "portable", "stray")
        ]

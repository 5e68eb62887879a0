# SPDX-License-Identifier: Apache-2.0
"""Lowering: each region becomes its owner's kernel, or stays simulated with a reason."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, convert_pt2e, prepare_pt2e
from qompose.backend import (
    CallSignature,
    Finished,
    Kernel,
    NotLowerable,
    OperatorPattern,
    Pattern,
    Region,
    Target,
    on_integers,
)
from qompose.errors import ConfigError, MemberError, NotLoweredError, TargetError
from qompose.lowering.lower_regions import check_target
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop import foreign
from tests.core.toy import (
    CAT,
    LINEAR,
    LINEAR_PATTERN,
    RELU,
    SIGMOID,
    STATIC,
    STATIC_UINT8,
    VIEW,
    Model,
    convert,
    emit_linear,
    export,
    nodes_calling,
    operators,
    randn,
    rule,
    seeded,
    sqnr,
    toy,
)

X = randn(6, 3)


NET = Model(
    lambda m, x: m.second(m.first(x).view(-1, 4)),
    first=nn.Linear(3, 4),
    second=nn.Linear(4, 2, bias=False),
)
PROGRAM = export(seeded(NET), X)


def linear_for(**kernels: Kernel) -> Any:
    return rule("linear", *LINEAR.patterns, anchor="op", weight="weight", kernels=kernels)


def refuse(region: Region) -> Node:
    raise NotLowerable(f"the moon is full over {region.output_node.name}")


def test_a_fully_lowered_model_has_no_float_operator_but_at_its_borders() -> None:
    converted = convert(PROGRAM, toy(LINEAR, VIEW), X)
    lowered = qompose.lower(converted, strict=True)
    calls = {str(n.target) for n in lowered.graph.nodes if n.op == "call_function"}
    assert calls == {
        "quantized_decomposed.quantize_per_tensor.default", "qompose_toy.linear.default",
        "aten.reshape.default", "quantized_decomposed.dequantize_per_tensor.default",
    }  # fmt: skip
    assert operators(lowered)["linear"] == 2
    assert nodes_calling(lowered, "reshape")[0].meta["val"].dtype is torch.int8
    assert sqnr(converted(X), lowered(X)) > 35
    names = set(lowered.state_dict())
    assert {"first.weight_q", "second.weight_q", "first.bias"} <= names
    assert not any("weight_scale" in name or "zero_point" in name for name in names)


def test_a_kernel_is_given_its_region() -> None:
    seen: dict[str, Any] = {}

    def look(region: Region) -> Node:
        x, weight = region.quantized("input"), region.quantized("weight")
        seen[region.claim.anchor] = {
            "input": (x.low, x.high, x.dtype, x.axis),
            "weight": tuple(weight.tensor.shape),
            "scales": tuple(weight.scales.shape),
            "axis": weight.axis,
            "zero points": bool(weight.zero_points.any()),
            "bias": region.argument("op", "bias"),
            "output": region.output is not None,
            "node": region.node("op").name,
        }
        return emit_linear(region)

    qompose.lower(convert(PROGRAM, toy(linear_for(torch=Kernel("look", look)), VIEW), X))
    assert seen["linear_1"] == {
        "input": (-128, 127, torch.int8, None), "weight": (2, 4), "scales": (2,), "axis": 0,
        "zero points": False, "bias": None, "output": True, "node": "linear_1",
    }  # fmt: skip
    assert isinstance(seen["linear"]["bias"], Node)


def test_what_a_kernel_pads_leaves_open_sizes_open() -> None:
    """In the lowered model, and in the program that it was made from."""

    def padded(region: Region) -> Node:
        source, weight = region.quantized("input"), region.quantized("weight")
        wider = region.step(
            torch.ops.aten.constant_pad_nd.default, source.node, [0, 1], source.zero_point
        )
        narrow = region.step(torch.ops.aten.slice.Tensor, wider, 1, 0, weight.tensor.shape[1])
        seen.append((wider.meta["val"].shape, narrow.meta["val"].shape))
        return emit_linear(region)

    seen: list[Any] = []
    program = export(seeded(nn.Linear(3, 4)), X, dynamic_shapes=({0: torch.export.Dim("rows")},))
    qompose.lower(convert(program, toy(linear_for(torch=Kernel("padded", padded))), X))
    ((wider, narrow),) = seen
    assert isinstance(wider[0], torch.SymInt) and wider[0].node.maybe_as_int() is None
    assert wider[0] == narrow[0] and (wider[1], narrow[1]) == (4, 3)
    again = program.module(check_guards=False)
    (x,) = (node for node in again.graph.nodes if node.op == "placeholder")
    assert x.meta["val"].shape[0].node.maybe_as_int() is None


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        pytest.param({"torch": Kernel("refuses", refuse)}, "the moon is full over", id="refused"),
        pytest.param({"elsewhere": Kernel("k", refuse)}, "no kernel for torch", id="not there"),
    ],
)
def test_what_cannot_be_lowered_stays_simulated_and_is_named(kernels: Any, reason: str) -> None:
    converted = convert(PROGRAM, toy(linear_for(**kernels), VIEW), X)
    with pytest.warns(QomposeWarning) as caught:
        lowered = qompose.lower(converted)
    text = str(caught[0].message)
    assert len(caught) == 1
    assert "linear in first (toy, rule linear): " in text
    assert "linear_1 in second (toy, rule linear): " in text
    assert reason in text
    assert torch.equal(lowered(X), converted(X))
    rows = {row.name: row for row in qompose.report(lowered).rows}
    assert rows["linear"].state == "simulated (Q/DQ)"
    assert reason in rows["linear"].reason
    with pytest.raises(NotLoweredError, match=reason):
        qompose.lower(converted, strict=True)


def test_a_programming_error_in_a_kernel_is_not_a_fallback() -> None:
    def broken(region: Region) -> Node:
        raise ZeroDivisionError

    converted = convert(PROGRAM, toy(linear_for(torch=Kernel("broken", broken))), X)
    with pytest.raises(qompose.errors.MemberError, match="'broken' of toy") as e:
        qompose.lower(converted)
    assert isinstance(e.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("emitted", [3, next(iter(PROGRAM.graph.nodes))], ids=["3", "elsewhere"])
def test_a_kernel_that_returns_no_node_of_the_graph_is_named(emitted: Any) -> None:
    converted = convert(PROGRAM, toy(linear_for(torch=Kernel("strays", lambda _: emitted))), X)
    with pytest.raises(ConfigError, match=r"'strays' of toy, .* must return a node"):
        qompose.lower(converted)


def test_a_kernel_with_float_output_leaves_quantizing_to_its_readers() -> None:
    kernel = Kernel("toy linear", emit_linear, float_output=True)
    converted = convert(PROGRAM, toy(linear_for(torch=kernel)), X)
    lowered = qompose.lower(converted)
    (kernel_node, _) = nodes_calling(lowered, "linear")
    assert kernel_node.meta["val"].dtype is torch.float32
    assert torch.allclose(lowered(X), converted(X), atol=1e-5)


def test_a_kernel_that_gives_floats_for_integers_is_named() -> None:
    """They became the integers of the next kernel, which was blamed, or wrong."""

    def emit(region: Region) -> Node:
        return region.call(torch.ops.aten.relu.default, region.quantized("input").node)

    converted = convert(PROGRAM, toy(linear_for(torch=Kernel("floats", emit))), X)
    with pytest.raises(ConfigError, match=r"'floats' of toy, .* float_output=True"):
        qompose.lower(converted)


def other_dim(region: Region) -> Node:
    """Take apart another dimension than is asked for."""
    return region.call(torch.ops.aten.chunk.default, region.inputs("self")[0], 2, 0)


def padding(region: Region, insert: Any, *args: Any, **kwargs: Any) -> Node:
    source = region.quantized("input")
    return insert(torch.ops.aten.constant_pad_nd.default, source.node, [0, 5], *args, **kwargs)  # type: ignore[no-any-return]


def one_batch(region: Region) -> Node:
    """The sizes of the example, as numbers."""
    source = region.quantized("input").node
    return region.call(torch.ops.aten.new_zeros.default, source, [6, 4], dtype=torch.int8)


WRONG_SHAPES = {
    "declared as the region's": (lambda r: padding(r, r.call, dtype=torch.int8), r"\[6, 8\]"),
    "known from a step": (lambda r: padding(r, r.step), r"\[6, 8\]"),
    "behind a step": (
        lambda r: r.call(torch.ops.aten.neg.default, padding(r, r.step), dtype=torch.int8),
        r"\[6, 8\]",
    ),
    "with the batch of the example": (one_batch, r"\[6, 4\]"),
}


@pytest.mark.parametrize(
    ("case", "rows", "target"),
    [
        *((case, None, "torch") for case in WRONG_SHAPES if "batch" not in case),
        *((case, torch.export.Dim("rows"), "torch") for case in WRONG_SHAPES),
        ("declared as the region's", None, "device"),
    ],
)
def test_a_kernel_that_gives_another_shape_is_named(case: str, rows: Any, target: str) -> None:
    """At the call it was an error of another operator, or, behind a mean, a wrong number."""
    emit, given = WRONG_SHAPES[case]
    program = export(seeded(Model(lambda m, x: m.first(x).mean(0), first=nn.Linear(3, 4))), X,
                     dynamic_shapes=({0: rows},) if rows else None)  # fmt: skip
    quantizer = toy(linear_for(**{target: Kernel("short", emit)}), targets=(device(),))
    converted = convert(program, quantizer, X)
    given = given.replace("6, 8", r"\w+, 8") if rows else given
    with pytest.raises(ConfigError, match=rf"'short' of toy, rule linear, .*{given}.* in first"):
        qompose.lower(converted, target)
    (x,) = (n for n in program.graph.nodes if n.name == "x")
    assert rows is None or x.meta["val"].shape[0].node.maybe_as_int() is None


def integers(region: Region, given: torch.dtype, said: torch.dtype) -> Node:
    """New ones of one type, which are said to be of another."""
    source = region.quantized("input").node
    made = region.step(torch.ops.aten.new_zeros.default, source, [6, 4])
    return region.call(torch.ops.prims.convert_element_type.default, made, given, dtype=said)


@pytest.mark.parametrize("types", [(torch.uint8, torch.int8), (torch.float32, torch.int8)], ids=str)
def test_a_kernel_that_gives_another_type_than_it_says_is_named(types: Any) -> None:
    """The next reader's assertion, as the model ran, named nobody."""
    kernel = Kernel("other", lambda region: integers(region, *types))
    program = export(seeded(Model(lambda m, x: m.first(x), first=nn.Linear(3, 4))), X)
    converted = convert(program, toy(linear_for(torch=kernel)), X)
    with pytest.raises(ConfigError, match=rf"'other' of toy, .*{types[0]}.*{types[1]}"):
        qompose.lower(converted)


def test_a_kernel_that_gives_several_tensors_of_other_shapes_is_named() -> None:
    row = rule("chunk", OperatorPattern((torch.ops.aten.chunk.default,)), activations=("self",),
               output=False, kernels={"torch": Kernel("chunks", other_dim)})  # fmt: skip
    program = export(Model(lambda m, x: x.chunk(2, 1)), randn(6, 4))
    with pytest.raises(ConfigError, match=r"'chunks' of toy, .*\[3, 4\], \[3, 4\]"):
        qompose.lower(convert(program, toy(row), randn(6, 4)))


def two_readers(m: Any, x: Tensor) -> Tensor:
    y = m.first(x)
    return m.left(y) + m.right(y)


def test_a_kernel_whose_readers_want_different_integers_gives_floats() -> None:
    """Without a specification of its own output, it requantizes only where all readers agree."""
    row = rule("linear", *LINEAR.patterns, anchor="op", weight="weight", output=False,
               kernels=LINEAR.kernels)  # fmt: skip
    layers = {name: nn.Linear(3, 3) for name in ("first", "left", "right")}
    program = export(seeded(Model(two_readers, **layers)), X)
    kinds = []
    for right in (STATIC, STATIC_UINT8):
        converted = convert(program, toy(row).set_module_name("right", right), X)
        lowered = qompose.lower(converted, strict=True)
        assert sqnr(converted(X), lowered(X)) > 35
        first = next(n for n in lowered.graph.nodes if "qompose_toy" in str(n.target))
        kinds.append(first.meta["val"].dtype)
    assert kinds == [torch.int8, torch.float32]


def views(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x).view(-1, 2, 2).permute(0, 2, 1)
    return torch.cat([y, y], dim=1)


def test_operators_that_move_values_run_on_integers() -> None:
    program = export(seeded(Model(views, linear=nn.Linear(3, 4))), X)
    converted = convert(program, toy(LINEAR, VIEW, CAT), X)
    lowered = qompose.lower(converted, strict=True)
    for name in ("reshape", "permute", "cat"):
        (node,) = nodes_calling(lowered, name)
        assert node.meta["val"].dtype is torch.int8
    assert torch.equal(lowered(X), converted(X))


FINISHED: list[Any] = []


def device(finish: Any = None, availability: Any = lambda: None) -> Target:
    def keep(module: GraphModule, signature: CallSignature) -> Finished:
        FINISHED.append((module, signature))
        return Finished(module)

    return Target("device", finish or keep, availability)


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that take turns after every few operations, as they seldom do by themselves."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("switching")
def test_several_threads_prepare_convert_and_lower_one_program() -> None:
    """Patterns are exported on first use, and copies of a program share the mode of its fake tensors."""

    def function(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.linear(input, weight, bias)

    pattern = Pattern(function, ((2, 3), (4, 3), (4,)), LINEAR_PATTERN.operators)
    quantizer = toy(
        rule("linear", pattern, anchor="op", weight="weight", kernels=LINEAR.kernels), VIEW
    )

    def lowered(_: int) -> GraphModule:
        model = prepare_pt2e(PROGRAM, quantizer)
        model(X)
        return qompose.lower(convert_pt2e(model))  # type: ignore[no-any-return]

    with ThreadPoolExecutor(3) as pool:
        first, *others = (model(X) for model in pool.map(lowered, range(6)))
    assert all(torch.equal(first, other) for other in others)


def test_last_steps_of_several_threads_follow_one_another() -> None:
    """They may export, which torch can do in one thread at a time."""
    inside, most = [0], [0]

    def finish(module: GraphModule, signature: CallSignature) -> Finished:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1
        return Finished(module)

    on_device = linear_for(device=Kernel("toy linear", emit_linear))
    converted = convert(PROGRAM, toy(on_device, targets=(device(finish),)), X)
    with ThreadPoolExecutor(3) as pool:
        assert len([*pool.map(lambda _: qompose.lower(converted, "device"), range(3))]) == 3
    assert most == [1]


def test_a_target_takes_the_last_step_with_the_way_to_call() -> None:
    FINISHED.clear()
    on_device = linear_for(device=Kernel("toy linear", emit_linear))
    view = rule("view", *VIEW.patterns, activations=("self",), shares=True, condition="all",
                kernels={"device": VIEW.kernels["torch"]})  # fmt: skip
    converted = convert(PROGRAM, toy(on_device, view, targets=(device(),)), X)
    lowered = qompose.lower(converted, "device", strict=True)
    ((module, signature),) = FINISHED
    assert lowered is module
    assert [tuple(a.shape) for a in signature.args] == [(6, 3)]
    assert qompose.report(lowered).target == "device"


def test_regions_without_an_emission_are_the_targets_own() -> None:
    """It says which of them it took; the others stay simulated, with its reason."""

    def finish(module: GraphModule, signature: CallSignature) -> Finished:
        return Finished(module, {0: "delegate"}, {1: "too small for the delegate"})

    left = linear_for(device=Kernel("delegate"))
    converted = convert(PROGRAM, toy(left, targets=(device(finish),)), X)
    with pytest.warns(QomposeWarning, match=r"linear_1 .*: too small for the delegate"):
        lowered = qompose.lower(converted, "device")
    rows = {row.name: (row.state, row.kernel) for row in qompose.report(lowered).rows}
    assert rows["linear"] == ("int8 kernel", "delegate")
    assert rows["linear_1"] == ("simulated (Q/DQ)", "")


def test_a_target_that_is_not_available_says_why() -> None:
    missing = device(availability=lambda: "the package device-runtime is missing: pip install it")
    quantizer = toy(linear_for(device=Kernel("delegate")), targets=(missing,))
    with pytest.raises(TargetError, match=r"'device' .*device-runtime"):
        qompose.lower(convert(PROGRAM, quantizer, X), "device")


def leave() -> None:
    raise SystemExit("gone")


ANSWERS = [
    pytest.param(lambda: 1 / 0, "ZeroDivisionError: division by zero", id="raises"),
    pytest.param(leave, "SystemExit: gone", id="exits"),
    pytest.param(lambda: True, "True", id="no text"),
    pytest.param(lambda: 0, "0", id="false"),
]


@pytest.mark.parametrize("whose", ["target 'device' of mine", "backend 'mine'"])
@pytest.mark.parametrize(("answer", "said"), ANSWERS)
def test_who_cannot_say_whether_it_is_available_is_named(
    answer: Any, said: str, whose: str
) -> None:
    target, facts = "torch", {"availability": answer}
    if whose.startswith("target"):
        target, facts = "device", {"targets": (device(availability=answer),)}
    rules = linear_for(torch=LINEAR.kernels["torch"], device=Kernel("delegate"))
    converted = convert(PROGRAM, toy(rules, name="mine", **facts), X)
    with pytest.raises(MemberError, match=f"{whose}: .*{said}"):
        qompose.lower(converted, target)


def test_members_that_share_no_target_are_told_apart() -> None:
    first = toy(LINEAR, name="first").set_module_name("second", None)
    second = toy(linear_for(device=Kernel("delegate")), name="second", targets=(device(),))
    converted = convert(PROGRAM, qompose.compose(first, second), X)
    for target, other in (("torch", "second .* device"), ("device", "first .* torch")):
        with pytest.raises(TargetError, match=other):
            qompose.lower(converted, target)


def takes_second(model: GraphModule) -> None:
    linear = torch.ops.aten.linear.default
    _, second = (node for node in model.graph.nodes if node.target is linear)
    second.meta[foreign.KEY] = foreign.Annotation(foreign.edges(second, foreign.INT8), foreign.INT8)


def takes_first_of_three(model: GraphModule) -> None:
    first, _, _ = nodes_calling(model, "linear.default")
    first.meta[foreign.KEY] = foreign.Annotation(foreign.edges(first, foreign.INT8), foreign.INT8)


class TestMembersThatOnlyAnnotate:
    """A quantizer of another engine has no kernels: the others' are lowered all the same."""

    mixed = staticmethod(lambda: qompose.compose(foreign.By(takes_second), toy(LINEAR)))

    def test_their_regions_stay_simulated_with_that_reason(self) -> None:
        converted = convert(PROGRAM, self.mixed(), X)
        with pytest.warns(QomposeWarning, match=r"linear_1 .*tests\.By.*only annotates"):
            lowered = qompose.lower(converted)
        rows = {row.name: (row.state, row.reason) for row in qompose.report(lowered).rows}
        assert rows["linear"][0] == "int8 kernel"
        assert rows["linear_1"][0] == "simulated (Q/DQ)" and "only annotates" in rows["linear_1"][1]
        assert torch.equal(lowered(X), converted(X))
        with pytest.raises(NotLoweredError, match="linear_1"):
            qompose.lower(converted, strict=True)

    def test_the_target_must_suit_the_others(self) -> None:
        converted = convert(PROGRAM, self.mixed(), X)
        with pytest.raises(TargetError, match="'device'"):
            qompose.lower(converted, "device")

    def test_where_nobody_has_kernels_nothing_can_be_lowered(self) -> None:
        converted = convert(PROGRAM, foreign.By(takes_second), X)
        with pytest.raises(TargetError, match=r"tests\.By can only annotate"):
            qompose.lower(converted)


class TestTargetsThatReadQDQ:
    """What members that only annotate have claimed is left to the runtime, which says what became of it."""

    @staticmethod
    def converted(said: Finished | None = None, *, alone: bool = False) -> GraphModule:
        """A model of two linears: the second is a foreign member's, the first, unless `alone`, a toy's."""

        def finish(module: GraphModule, signature: CallSignature) -> Finished:
            FINISHED[:] = [module]
            return replace(said, model=module) if said else Finished(module)

        target = Target("device", finish, reads_qdq=True)
        rules = linear_for(device=Kernel("toy linear", emit_linear))
        member = toy(rules, targets=(target,))
        if alone:
            member.set_global(None)
        return convert(PROGRAM, qompose.compose(foreign.By(takes_second), member), X)

    def test_the_runtime_says_what_it_fused(self) -> None:
        model = self.converted(Finished(None, {0: "QGemm"}))
        lowered = qompose.lower(model, "device", strict=True)
        rows = {row.name: row.kernel for row in qompose.report(lowered).rows if row.kernel}
        assert rows == {"linear": "toy linear", "linear_1": "QGemm"}
        assert torch.equal(lowered(X), model(X))

    def test_it_gets_their_quantize_and_dequantize_operators(self) -> None:
        qompose.lower(self.converted(Finished(None, {0: "QGemm"})), "device")
        (module,) = FINISHED
        (second,) = nodes_calling(module, "linear.default")[-1:]
        assert all("dequantize" in str(source.target) for source in second.all_input_nodes[:2])
        assert all("quantize_per_tensor" in str(reader.target) for reader in second.users)

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            (
                Finished(None, fallbacks={0: "it computes Gemm in float"}),
                "it computes Gemm in float",
            ),
            (None, "its quantizer only annotates and has no kernels"),
        ],
        ids=["says", "is silent"],
    )
    def test_what_it_does_not_fuse_is_simulated_with_a_reason(
        self, said: Finished | None, reason: str
    ) -> None:
        converted = self.converted(said)
        with pytest.warns(QomposeWarning, match="linear_1"):
            lowered = qompose.lower(converted, "device")
        (row,) = (row for row in qompose.report(lowered).rows if row.name == "linear_1")
        assert (row.state, row.reason) == ("simulated (Q/DQ)", reason)
        with pytest.raises(NotLoweredError, match="linear_1"):
            qompose.lower(converted, "device", strict=True)

    def test_a_member_that_brings_the_runtime_is_enough(self) -> None:
        """Another target of the same composition refuses: nobody has a kernel for it."""
        converted = self.converted(Finished(None, {0: "QGemm"}), alone=True)
        lowered = qompose.lower(converted, "device", strict=True)
        assert [row.kernel for row in qompose.report(lowered).rows if row.kernel] == ["QGemm"]
        with pytest.raises(TargetError, match="can only annotate"):
            qompose.lower(converted)

    def test_what_only_unread_regions_read_is_unread(self) -> None:
        """It is no region that the runtime did not accept, which `strict` would not allow."""
        target = Target("device", lambda module, signature: Finished(module), reads_qdq=True)
        member = toy(linear_for(device=Kernel("toy linear", emit_linear)), targets=(target,))
        layers = {"main": nn.Linear(8, 8), "first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}
        model, x = Model(lambda m, x: (m.second(m.first(x)), m.main(x))[1], **layers), randn(4, 8)
        converted = convert(
            export(model, x), qompose.compose(foreign.By(takes_first_of_three), member), x
        )
        rows = qompose.report(qompose.lower(converted, "device", strict=True)).rows
        assert [row.state for row in rows] == [
            "simulated (Q/DQ)",
            "simulated (Q/DQ)",
            "int8 kernel",
        ]
        assert all("nothing reads its output" in row.reason for row in rows[:2])

    def test_quantize_knows_it_before_data(self) -> None:
        """`strict` refuses members without kernels at once, but not where the runtime takes their regions."""
        finish = lambda module, signature: Finished(module, {0: "QGemm"})  # noqa: E731
        for reads_qdq in (True, False):
            target = Target("device", finish, reads_qdq=reads_qdq)
            rules = linear_for(device=Kernel("toy linear", emit_linear))
            members = qompose.compose(foreign.By(takes_second), toy(rules, targets=(target,)))
            prepared = qompose.prepare_pt2e(PROGRAM, members)
            if reads_qdq:
                check_target(prepared, "device", strict=True)
            else:
                with pytest.raises(NotLoweredError, match="linear_1"):
                    check_target(prepared, "device", strict=True)


def test_a_model_without_claims_lowers_to_itself() -> None:
    converted = convert(PROGRAM, toy(SIGMOID), X)
    assert torch.equal(qompose.lower(converted, strict=True)(X), PROGRAM.module()(X))


def test_relu_on_integers_clamps_at_the_zero_point() -> None:
    relu = replace(RELU, shares=True, kernels={"torch": Kernel("integers", on_integers)})
    program = export(seeded(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), X)
    converted = convert(program, toy(LINEAR, relu), X)
    lowered = qompose.lower(converted)
    assert "relu" not in operators(lowered)
    assert torch.equal(lowered(X), converted(X))


@pytest.mark.parametrize(
    ("rule_", "operator"),
    [
        pytest.param(replace(RELU, output=False), torch.relu, id="a float output"),
        pytest.param(RELU, torch.relu, id="two scales"),
        pytest.param(replace(SIGMOID, shares=True), torch.sigmoid, id="other values"),
        pytest.param(
            rule("pool", OperatorPattern((torch.ops.aten.max_pool1d.default,)),
                 activations=("self",), shares=True),
            lambda x: nn.functional.max_pool1d(x, 2), id="not for this dtype"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_on_integers_stays_as_it_is(rule_: Any, operator: Any) -> None:
    quantizer = toy(LINEAR, replace(rule_, kernels={"torch": Kernel("integers", on_integers)}))
    model = Model(lambda m, x: operator(m.linear(x)), linear=nn.Linear(3, 4))
    converted = convert(export(seeded(model), X), quantizer, X)
    with pytest.warns(QomposeWarning):
        lowered = qompose.lower(converted)
    assert torch.equal(lowered(X), converted(X))


def test_what_nobody_reads_is_left_out_and_said_so() -> None:
    layers = {"main": nn.Linear(8, 8), "aside": nn.Linear(8, 8)}
    model, x = Model(lambda m, x: (m.aside(x), m.main(x))[1], **layers), randn(4, 8)
    lowered = qompose.lower(convert(export(model, x), toy(LINEAR), x))
    aside, main = qompose.report(lowered).rows
    assert main.state == "int8 kernel"
    assert (aside.state, aside.module) == ("simulated (Q/DQ)", "aside")
    assert "nothing reads its output" in aside.reason
    assert operators(lowered)["linear"] == 1
    assert "aside.weight_q" not in dict(lowered.named_buffers())

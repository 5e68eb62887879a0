# SPDX-License-Identifier: Apache-2.0
"""Observers that convert themselves: what they put in their place is kept, and stands for itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import qompose
import torch
from qompose.program.graph import get_attribute, module_path, set_attribute
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.quantizer.interop.foreign import INT8, WEIGHT, By, Shared, Spec, aten, calls, put
from tests.core.toy import (
    LINEAR,
    Call,
    Model,
    convert,
    export,
    graph_text,
    nodes_calling,
    observers_of,
    prepare,
    randn,
    seeded,
    sqnr,
    toy,
)

X = randn(8, 6)
CHANNELS = torch.per_channel_symmetric


class Decompressor(nn.Module):
    """Makes floats of bytes, per row."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, integers: Tensor) -> Tensor:
        return (integers.to(torch.float32) - 128) * self.scale


class Compressing(nn.Module):
    """Like OpenVINO's: bytes and a module in the place of a parameter, for all that reads its node."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.dtype = arguments["dtype"]

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Take another argument than others do."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return torch.clamp(torch.round(weight / scale) + 128, 0, 255).to(torch.uint8), scale

    def convert(self, model: GraphModule, node: Node) -> None:
        (weight,) = node.all_input_nodes
        integers, scale = self.calculate_qparams(get_attribute(model, str(weight.target)))
        first = next(n for n in model.graph.nodes if n in weight.users)
        name = f"{weight.name}_bytes"
        model.register_buffer(name, integers)
        model.add_module(f"{name}_decompressor", Decompressor(scale))
        with model.graph.inserting_before(first):
            read = model.graph.get_attr(name)
            read.meta = dict(weight.meta)
            made = model.graph.call_module(f"{name}_decompressor", (read,))
        made.meta["val"] = getattr(model, f"{name}_decompressor")(integers)
        weight.replace_all_uses_with(made)
        node.replace_all_uses_with(made)
        model.graph.eliminate_dead_code()


BYTES = Spec(torch.int8, Compressing, -128, 127, CHANNELS, ch_axis=0)


def member(weight: Any = BYTES, targets: Any = (aten.linear.default,)) -> Any:
    """A foreign quantizer of weights; `weight` may be a function of the node."""

    def write(model: GraphModule) -> None:
        for node in calls(model, *targets):
            asked = weight if isinstance(weight, Spec) else weight(node)
            if asked is not None:
                put(node, {node.args[1]: asked})

    return By(write)


def spec(convert_it: Any) -> Spec:
    """Of an observer that does `convert_it(model, node)`."""

    class Doing(Compressing):
        def convert(self, model: GraphModule, node: Node) -> None:
            convert_it(model, node)

    return Spec(torch.int8, Doing, -128, 127, CHANNELS, ch_axis=0)


def two(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x)))


def net(function: Any = two, outputs: int = 4) -> Any:
    return seeded(Model(function, a=nn.Linear(6, 6), b=nn.Linear(6, outputs)))


def tied() -> Any:
    """One matrix that two products read, and a sum that is no product."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.a(x)
        return y, nn.functional.linear(y, self.a.weight), self.a.weight.sum()

    return seeded(Model(forward, a=nn.Linear(6, 6, bias=False)))


def rounded(weight: Tensor) -> Tensor:
    """What the decompressor makes of it."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (torch.round(weight / scale) * scale).detach()


def converted(model: nn.Module | None = None, quantizer: Any = None, **options: Any) -> GraphModule:
    float_model = net() if model is None else model
    return convert(export(float_model, X), qompose.compose(quantizer or member()), X, **options)


class TestResult:
    """What an observer made is part of the program like any other."""

    def expected(self) -> Tensor:
        model = net()
        for part in (model.a, model.b):
            part.weight.data = rounded(part.weight)
        return model(X).detach()  # type: ignore[no-any-return]

    def test_it_runs_and_the_floats_are_gone(self) -> None:
        found = converted()
        assert torch.equal(found(X), self.expected())
        assert sqnr(net()(X), found(X)) > 35
        assert sorted(found.state_dict()) == [
            "a.bias", "a_weight_bytes", "a_weight_bytes_decompressor.scale",
            "b.bias", "b_weight_bytes", "b_weight_bytes_decompressor.scale",
        ]  # fmt: skip
        report = qompose.report(found)
        states = {row.operator: row.state for row in report.rows}
        assert states["aten.linear"] == "simulated (Q/DQ)"
        assert report.bytes_after == report.bytes_before / 2
        assert report.notes == ()

    def test_nodes_have_what_others_have(self) -> None:
        """An example that holds no data, and the module where they belong."""
        for node in converted().graph.nodes:
            if node.op in ("get_attr", "call_module"):
                value = node.meta["val"]
                assert type(value) is not Tensor
                is_bytes = node.op == "get_attr" and node.name.endswith("_bytes")
                assert value.dtype is (torch.uint8 if is_bytes else torch.float32)
                assert module_path(node) in ("a", "b") or "bias" in node.name

    @pytest.mark.parametrize(
        "options",
        [{"fold_quantize": False}, {"use_reference_representation": True}, {"inplace": True}],
    )
    def test_however_it_is_converted(self, options: dict[str, bool]) -> None:
        assert torch.equal(converted(**options)(X), self.expected())

    def test_a_prepared_model_can_be_converted_again(self) -> None:
        prepared = prepare(export(net(), X), qompose.compose(member()))
        text, names = graph_text(prepared), set(prepared.state_dict())
        first = qompose.convert_pt2e(prepared)
        assert (graph_text(prepared), set(prepared.state_dict())) == (text, names)
        assert torch.equal(prepared(X), net()(X))
        assert torch.equal(qompose.convert_pt2e(prepared)(X), first(X))

    def test_bounds_outside_the_type_are_its_own_affair(self) -> None:
        """Of an observer that qompose converts they are refused."""
        wide = Spec(torch.int8, Compressing, 0, 255, CHANNELS, ch_axis=0)
        assert torch.equal(converted(quantizer=member(wide))(X), self.expected())
        plain = Spec(torch.int8, WEIGHT.observer_or_fake_quant_ctr, 0, 255, CHANNELS, ch_axis=0)
        with pytest.raises(qompose.errors.ConfigError, match=r"a_weight -> linear.*quant_max=255"):
            converted(quantizer=member(plain))

    def test_a_body_holds_no_modules(self) -> None:
        """Torch runs none with tensors there: the region stays in float, and the report says why."""

        def branching(self: Any, x: Tensor) -> Tensor:
            y = torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: torch.tanh(x), (x,))
            return self.b(y)

        model: Any = seeded(Model(branching, a=nn.Linear(6, 6), b=nn.Linear(6, 6)))
        positive = X.abs()
        found = convert(export(model, positive), qompose.compose(member()), positive)
        rows = {row.module: row for row in qompose.report(found).rows if row.macs}
        assert rows["b"].state == "simulated (Q/DQ)"
        assert rows["a"].state == "float"
        assert "Compressing" in rows["a"].reason and "true_graph_0_a_weight" in rows["a"].reason
        model.b.weight.data = rounded(model.b.weight)
        assert torch.equal(found(positive), model(positive))
        assert torch.equal(found(-positive), model(-positive))


class TestSites:
    """Each place where a parameter is read."""

    def test_what_is_not_observed_follows_and_is_named(self) -> None:
        model = tied()
        found = converted(model, member(lambda node: BYTES if node.name == "linear" else None))
        model.a.weight.data = rounded(model.a.weight)
        for one, other in zip(found(X), model(X), strict=True):
            assert torch.equal(one, other)
        start = "a_weight -> linear in a (tests.By, rule annotation)"
        (note,) = (note for note in qompose.report(found).notes if note.startswith(start))
        assert "Compressing" in note and "linear_1, sum_1" in note

    def test_what_others_observe_stays_theirs(self) -> None:
        """Though both ask for the same integers."""
        alike = Spec(torch.int8, Compressing, -127, 127, CHANNELS, ch_axis=0)

        def theirs(node: Node) -> Any:
            return {"linear": alike, "linear_1": WEIGHT}[node.name]

        model = tied()
        found = converted(copy.deepcopy(model), member(theirs))
        (dequantize,) = nodes_calling(found, "dequantize_per_channel")
        assert [user.name for user in dequantize.users] == ["linear_1"]
        weight = model.a.weight.detach()
        model.a.weight.data = rounded(weight)
        first = model.a(X)
        assert torch.equal(found(X)[0], first)
        assert torch.equal(found(X)[2], weight.sum()), "nobody asked for the sum"
        assert sqnr(first @ weight.T, found(X)[1]) > 35
        tables, floats = qompose.report(found).notes
        assert "Compressing" in tables and "a.weight" in floats

    def test_one_observer_of_two_parameters(self) -> None:
        def shared(model: GraphModule) -> None:
            first, second = calls(model, aten.linear.default)
            put(first, {first.args[1]: BYTES})
            put(second, {second.args[1]: Shared((first.args[1], first))})

        model = net(outputs=6)
        found = converted(model, By(shared))
        for part in (model.a, model.b):
            part.weight.data = rounded(part.weight)
        assert torch.equal(found(X), model(X))

    def test_composed_with_ours_on_one_parameter(self) -> None:
        """Neither member's table becomes the other's."""
        members = (member(lambda n: BYTES if n.name == "linear" else None), toy(LINEAR))
        found = converted(tied(), qompose.compose(*members))
        owners = {row.name: row.owner for row in qompose.report(found).rows}
        assert (owners["linear"], owners["linear_1"]) == ("tests.By", "toy")
        assert len(nodes_calling(found, "dequantize_per_channel")) == 1
        assert len(observers_of(found)) == 1, "a decompressor"
        assert sqnr(tied()(X)[1], found(X)[1]) > 25

    def test_it_may_remove_observers_that_nothing_reads(self) -> None:
        def write(model: GraphModule) -> None:
            member().annotate(model)
            (unused,) = (n for n in model.graph.nodes if n.name == "unused")
            put(unused, output=INT8)

        other = randn(3)
        program = export(net(lambda m, x, unused: two(m, x)), X, other)
        found = convert(program, qompose.compose(By(write)), X, other)
        assert torch.equal(found(X, other), converted()(X))

    def test_a_dropped_claim_is_not_converted(self) -> None:
        def write(model: GraphModule) -> None:
            (cat,) = calls(model, aten.cat.default)
            put(cat, {cat.args[0][1]: BYTES})  # type: ignore[index]

        x = randn(2, 2)
        mask = torch.tensor([[0.0, -torch.inf], [1.0, 0.0]])
        model = Call(lambda x, mask: torch.cat([x, mask]), mask)
        prepared = qompose.prepare_pt2e(export(model, x), qompose.compose(By(write)))
        with pytest.warns(qompose.QomposeWarning):
            found = qompose.convert_pt2e(prepared)
        assert torch.equal(found(x), model(x))


def no_such_group(model: GraphModule, node: Node) -> None:
    raise KeyError("no such group")


def nothing_at_all(model: GraphModule, node: Node) -> None:
    """Leave the observer where it is."""


def removes_the_reader(model: GraphModule, node: Node) -> None:
    (reader,) = node.users
    reader.replace_all_uses_with(reader.args[0])
    model.graph.erase_node(reader)


def reads_what_comes_later(model: GraphModule, node: Node) -> None:
    (reader,) = node.users
    set_attribute(model, "late", randn(6, 6))
    with model.graph.inserting_after(reader):
        node.replace_all_uses_with(model.graph.get_attr("late"))


def reads_itself(model: GraphModule, node: Node) -> None:
    with model.graph.inserting_before(node):
        made = model.graph.call_function(aten.tanh.default, (node.args[0],))
    node.replace_all_uses_with(made)
    made.args = (made,)
    model.graph.erase_node(node)


class TestFaults:
    """A convert that fails, or that leaves what cannot run, is named with its tensor."""

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            (no_such_group, "KeyError: 'no such group'"),
            (nothing_at_all, "activation_post_process_"),
            (removes_the_reader, "linear"),
            (reads_what_comes_later, "linear .*late"),
            (reads_itself, "tanh"),
        ],
    )
    def test_faults(self, fault: Any, message: str) -> None:
        quantizer = member(lambda node: spec(fault) if node.name == "linear" else BYTES)
        prepared = prepare(export(net(), X), qompose.compose(quantizer))
        text, names = graph_text(prepared), set(prepared.state_dict())
        where = r"Doing.convert .*a_weight -> linear in a \(tests.By, rule annotation\)"
        with pytest.raises(qompose.errors.MemberError, match=f"{where}.*{message}"):
            qompose.convert_pt2e(prepared)
        assert (graph_text(prepared), set(prepared.state_dict())) == (text, names)
        assert torch.equal(prepared(X), net()(X))

    def test_harm_done_elsewhere_is_named(self) -> None:
        def elsewhere(model: GraphModule, node: Node) -> None:
            node.replace_all_uses_with(node.args[0])
            last = next(n for n in model.graph.nodes if n.name == "linear_1")
            late = model.graph.output_node()
            late.prepend(last)
            for argument in last.all_input_nodes:
                late.append(argument)

        quantizer = member(lambda node: spec(elsewhere) if node.name == "linear" else None)
        with pytest.raises(qompose.errors.MemberError, match="Doing"):
            converted(quantizer=quantizer)

    def test_what_is_there_for_its_effect_may_not_be_removed(self) -> None:
        def checked(m: Any, x: Tensor) -> Tensor:
            torch.ops.aten._assert_async.msg(x.sum() < 1e6, "too large")
            return two(m, x)

        def careless(model: GraphModule, node: Node) -> None:
            Compressing(dtype=torch.int8).convert(model, node)
            for other in reversed(model.graph.nodes):
                if not other.users and other.op == "call_function":
                    model.graph.erase_node(other)

        program = export(net(checked), X)
        assert nodes_calling(program.module(), "_assert_async")
        with pytest.raises(qompose.errors.MemberError, match="_assert_async"):
            convert(program, qompose.compose(member(spec(careless))), X)

    def test_one_that_leaves_floats_is_listed(self) -> None:
        def nothing(model: GraphModule, node: Node) -> None:
            node.replace_all_uses_with(node.args[0])

        found = converted(quantizer=member(spec(nothing)))
        assert torch.equal(found(X), net()(X))
        notes = qompose.report(found).notes
        assert len(notes) == 2
        assert all("Doing" in note for note in notes)

    def test_one_that_must_see_data_first(self) -> None:
        class Blocks(Compressing):
            def __init__(self, **arguments: Any) -> None:
                super().__init__(**arguments)
                self.block_size: Any = None

            def forward(self, x: Tensor) -> Tensor:
                self.block_size = x.shape[1:]
                return x

        def inputs(model: GraphModule) -> None:
            for node in calls(model, aten.tanh.default):
                put(node, {node.args[0]: Spec(torch.int8, Blocks, -128, 127, is_dynamic=True)})

        prepared = prepare(export(net(), X), qompose.compose(By(inputs)))
        with pytest.raises(qompose.errors.UncalibratedError, match="linear -> tanh"):
            qompose.convert_pt2e(prepared)

# SPDX-License-Identifier: Apache-2.0
"""Which operators of a transformed program are those of the program, and which stand in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from qompose.errors import UserError
from qompose.program.graph import copy_graph_module, get_attribute
from qompose.program.meta import tag_of
from qompose.quantizer.interop import equivalence
from qompose.quantizer.interop.alignment import align
from qompose.quantizer.interop.correspondence import stamp
from qompose.spec.claim import Change
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import (
    X,
    aligned,
    changes_of,
    check,
    edges,
    exported_function,
    run,
)
from tests.core.quantizer.interop.programs import WIDTH, Random, exported
from tests.core.quantizer.interop.transforms import constant, insert, rebuild, replace, sites

aten = torch.ops.aten


class TestNoChange:
    """A program that nobody changed."""

    @pytest.mark.parametrize("stamped", [True, False])
    @pytest.mark.parametrize("transform", [lambda own: own, rebuild], ids=["same", "rebuilt"])
    def test_nothing_is_run(
        self, transform: transforms.Transform, stamped: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(equivalence, "run", None)
        steps = [(kind, 0, 1) for kind in ("linear", "swap", "gelu", "table", "norm", "sized")]
        program = exported(Random(steps, [0, 2]), dynamic=True)
        before, own = copy_graph_module(program), copy_graph_module(program)
        if stamped:
            stamp(own)
        after = transform(own)
        assert align(before, after).changes == ()
        used = {name: ends for name, ends in edges(before).items() if ends or name == "first"}
        assert edges(after).items() >= used.items()

    def test_stamps_are_removed(self) -> None:
        program = exported_function(lambda m, x: x.relu())
        site = next(node for node in program.graph.nodes if node.op == "call_function")
        site.meta["custom"] = {"theirs": 1, "qompose": {"source": "conv"}}
        _, _, after = aligned(program, rebuild)
        assert all(tag_of(node, "stamp") is None for node in after.graph.nodes)
        assert sites(after, aten.relu.default)[0].meta["custom"] == site.meta["custom"]


class TestIdentities:
    """Operators that a pass removes."""

    def test_in_front_of_the_output(self) -> None:
        program = exported_function(
            lambda m, x: F.dropout(m.linear(x), 0.5, m.training), linear=nn.Linear(WIDTH, WIDTH)
        )
        alignment, _, after = aligned(program, transforms.drop_identities)
        assert alignment.changes == (Change(("linear", "dropout"), ("dropout",)),)
        assert edges(after)["output"] == ("dropout",)
        check(program, transforms.drop_identities, (X,))

    def test_between_an_input_and_the_output(self) -> None:
        program = exported_function(lambda m, x: F.dropout(x, 0.5, m.training))
        assert changes_of(program, transforms.drop_identities) == [Change(("dropout",), ())]

    def test_where_both_values_are_returned(self) -> None:
        program = exported_function(lambda m, x: (x.relu(), x.relu().clone(), x.sin()))
        merged = exported_function(lambda m, x: [y := x.relu(), y.clone()])
        assert changes_of(program, transforms.drop_identities) == [
            Change(("relu_1", "clone"), ("clone",))
        ]
        assert changes_of(merged, transforms.drop_identities) == [Change(("clone",), ())]

    def test_with_one_reader_that_is_an_operator(self) -> None:
        """What is left stands for the removed one, so that what reads it is not concerned."""
        program = exported_function(lambda m, x: (x.sin().clone() + 1.0).relu())
        (change,) = changes_of(program, transforms.drop_identities)
        assert change == Change(("sin", "clone"), ("clone",))

    def test_beside_other_readers(self) -> None:
        """Two values are one then: what read the removed one is in its place."""
        program = exported_function(lambda m, x: [y := x.sin(), y.clone() + 1.0, y.exp()][1:])
        (change,) = changes_of(program, transforms.drop_identities)
        assert change == Change(("clone", "add"), ("add",))


class TestInsertions:
    """Operators that a pass puts between others."""

    def test_on_one_edge(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            site = sites(own, aten.exp.default)[0]
            site.args = (insert(site, aten.clone.default, site.args[0]),)
            return own

        program = exported_function(lambda m, x: [y := x.sin(), y.exp(), y.cos()])
        assert changes_of(program, transform) == [Change(("exp",), ("exp_clone", "exp"))]

    def test_behind_a_value(self) -> None:
        """All readers read the second cast; it has the value's name."""

        def transform(own: GraphModule) -> GraphModule:
            return transforms.cast_values(own, stamped=True)

        program = exported_function(lambda m, x: [y := x.softmax(1), y.exp(), y.cos()][1:])
        (change,) = changes_of(program, transform)
        assert change == Change(("softmax",), ("softmax_softmax", "softmax_to", "softmax"))

    def test_behind_an_input(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            x = next(node for node in own.graph.nodes if node.op == "placeholder")
            readers = list(x.users)
            with own.graph.inserting_after(x):
                cast = own.graph.call_function(aten.to.dtype, (x, torch.float64))
            for reader in readers:
                reader.replace_input_with(x, cast)
                with own.graph.inserting_after(reader):
                    back = own.graph.call_function(aten.to.dtype, (reader, torch.float32))
                reader.replace_all_uses_with(back, lambda user, back=back: user is not back)
            return own

        program = exported_function(lambda m, x: (x.sin(), x.cos()))
        (change,) = changes_of(program, transform)
        assert change.nodes == ("sin", "cos"), "both read the one cast"

    def test_what_nothing_reads(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            site = sites(own, aten.sin.default)[0]
            insert(site.next, aten.exp.default, site)
            return own

        program = exported_function(lambda m, x: x.sin().cos())
        assert changes_of(program, transform) == [Change((), ("output_exp",))]

    def test_like_another_one(self) -> None:
        """Without a stamp it could be any of those that call the same; those that have one come first."""

        def transform(own: GraphModule) -> GraphModule:
            site = sites(own, aten.sin.default)[0]
            insert(site, aten.sin.default, site.args[0], stamped=False)
            return own

        program = exported_function(lambda m, x: (x.sin().exp(), x.sin().cos()))
        assert changes_of(program, transform) == [Change((), ("output_sin",))]


class TestFusion:
    """Operators that become one, with the stamp of the first."""

    def test_between_unchanged_ones(self) -> None:
        program = exported_function(lambda m, x: (x + x.sin()).relu().exp())
        assert changes_of(program, transforms.fuse_relu) == [Change(("add", "relu"), ("relu",))]

    def test_in_front_of_a_decomposed_one(self) -> None:
        """The stamp says that the sum is what the fused operator gives; running it says that it is not."""

        def transform(own: GraphModule) -> GraphModule:
            return transforms.split_gelu(transforms.fuse_relu(own))

        program = exported_function(lambda m, x: F.gelu((x + x.sin()).relu()).exp())
        first, second = changes_of(program, transform)
        assert first == Change(("add", "relu"), ("relu",)) and second.nodes == ("gelu",)

    def test_batch_norm_into_a_convolution(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (norm,) = sites(own, aten.batch_norm.default)
            conv = norm.args[0]
            assert isinstance(conv, Node)
            weight, bias = (get_attribute(own, str(n.target)) for n in conv.args[1:3])  # type: ignore[union-attr]
            w, b, mean, var = (get_attribute(own, str(n.target)) for n in norm.args[1:5])  # type: ignore[union-attr]
            factor = (w / (var + 1e-5).sqrt()).detach()
            folded = constant(own, conv, weight.detach() * factor[:, None, None, None])
            shifted = constant(own, conv, (bias.detach() - mean) * factor + b.detach())
            conv.args = (conv.args[0], folded, shifted, *conv.args[3:])
            replace(norm, conv)
            return own

        norm = nn.BatchNorm2d(4)
        norm.running_mean.normal_(), norm.running_var.uniform_(1, 2)  # type: ignore[union-attr, operator]
        images = torch.randn(2, 3, 5, 5)
        program = exported_function(
            lambda m, x: m.norm(m.conv(x)).relu(), images, conv=nn.Conv2d(3, 4, 3), norm=norm
        )
        assert changes_of(program, transform, images) == [
            Change(("conv2d", "batch_norm"), ("batch_norm",))
        ]


def test_neighbours_that_are_all_decomposed_are_places_of_their_own() -> None:
    def transform(own: GraphModule) -> GraphModule:
        return rebuild(transforms.split_linear(transforms.split_gelu(own)))

    program = exported_function(
        lambda m, x: m.second(F.gelu(m.first(x))),
        first=nn.Linear(WIDTH, WIDTH),
        second=nn.Linear(WIDTH, WIDTH),
    )
    changes = changes_of(program, transform)
    assert [change.nodes for change in changes] == [("linear",), ("gelu",), ("linear_1",)]
    assert changes[0].pieces == ("linear_permute", "linear_matmul", "linear")


def test_several_results_of_one_operator() -> None:
    program = exported_function(lambda m, x: [a := x.sin().chunk(2, 1), a[0] + a[1]][1])
    (change,) = changes_of(program, transforms.split_chunk)
    assert change == Change(("chunk", "getitem", "getitem_1"), ("getitem", "getitem_1"))


def two_branches(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin().relu(), lambda x: x.cos(), (x.exp(),)).tanh()


class TestBodies:
    """Control flow: bodies are compared node by node."""

    def test_an_unchanged_one_keeps_its_names(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, torch.ops.higher_order.cond)
            body = get_attribute(own, str(site.args[1].target))  # type: ignore[union-attr]
            for number, node in enumerate(body.graph.nodes):
                node._rename(f"other_{number}")
            body.recompile()
            return rebuild(own)

        program = exported_function(two_branches)
        alignment, before, after = aligned(program, transform)
        assert alignment.changes == ()
        for name in ("true_graph_0", "false_graph_0"):
            theirs, ours = (
                {n.name: n.target for n in m.graph.nodes} for m in bodies(after, before, name)
            )
            assert theirs.keys() == ours.keys()
        assert torch.equal(run(after, (X,))[0], run(before, (X,))[0])


def bodies(after: GraphModule, before: GraphModule, name: str) -> list[GraphModule]:
    read = next(node for node in after.graph.nodes if node.name == name)
    return [get_attribute(after, str(read.target)), get_attribute(before, name)]


def returning(change: Callable[[GraphModule, Node], Any]) -> transforms.Transform:
    def transform(own: GraphModule) -> GraphModule:
        output = own.graph.output_node()
        output.args = (change(own, output),)
        own.graph.lint()
        return own

    return transform


def with_input(own: GraphModule) -> GraphModule:
    with own.graph.inserting_before(next(iter(own.graph.nodes))):
        own.graph.placeholder("more")
    return own


def swapped_inputs(own: GraphModule) -> GraphModule:
    first, second = (node for node in own.graph.nodes if node.op == "placeholder")
    first.prepend(second)
    return own


def with_module(own: GraphModule) -> GraphModule:
    own.add_module("relu", nn.ReLU())
    (site,) = sites(own, aten.sin.default)
    with own.graph.inserting_before(site):
        replace(site, own.graph.call_module("relu", (site.args[0],)))
    return own


def wide(own: GraphModule, output: Node) -> Any:
    values = list(output.args[0])  # type: ignore[arg-type]
    return [insert(output, aten.to.dtype, values[0], torch.float64), *values[1:]]


def flat(own: GraphModule, output: Node) -> Any:
    values = list(output.args[0])  # type: ignore[arg-type]
    return [insert(output, aten.reshape.default, values[0], [-1]), *values[1:]]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (with_input, "inputs: (x, y) became (more, x, y)"),
        (swapped_inputs, "order of the program's inputs: y stands for x"),
        (returning(lambda own, out: out.args[0][:1]), "outputs: 2 became 1"),
        (
            returning(lambda own, out: [None, out.args[0][1]]),
            "output 0 of the program: sin became None",
        ),
        (returning(wide), "output sin (aten.sin): float32 of shape (4, 6) became float64"),
        (returning(flat), "float32 of shape (4, 6) became float32 of shape (24)"),
        (with_module, "relu (call_module), a call_module node"),
    ],
    ids=["input", "order", "count", "none", "dtype", "shape", "module"],
)
def test_inputs_and_outputs_stay(transform: transforms.Transform, message: str) -> None:
    program = torch.export.export(TwoInputs(), (X, X.clone())).module(check_guards=False)
    assert isinstance(program, GraphModule)
    with pytest.raises(UserError) as error:
        aligned(program, transform)
    assert message in str(error.value)


class TwoInputs(nn.Module):
    """Returns a value that it does not compute with y, and y's sine."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x.sin(), y.exp()


def test_an_output_that_is_another_value() -> None:
    program = exported_function(lambda m, x, y: (x, y), X, X.clone())
    with pytest.raises(UserError, match="output 0 is inputs_1 now, which is another value"):
        aligned(program, returning(lambda own, out: out.args[0][::-1]))

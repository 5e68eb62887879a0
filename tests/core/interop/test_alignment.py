# SPDX-License-Identifier: Apache-2.0
"""A transform's changes, place by place: each can be made alone, and all together are what it made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qompose.claims import Change
from qompose.errors import InternalError, UserError
from qompose.graph import (
    copy_graph_module,
    get_attribute,
    refresh,
    set_attribute,
    tag_of,
    value_of,
)
from qompose.interop import equivalence, settling
from qompose.interop.alignment import align, stamp
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tests.core.interop import transforms
from tests.core.interop.aligning import aligned, applied, check, check_names, edges, run
from tests.core.interop.programs import WIDTH, Random, example, exported, programs
from tests.core.interop.transforms import constant, insert, rebuild, replace, sites

aten = torch.ops.aten


@given(
    model=programs,
    names=st.lists(st.sampled_from(sorted(transforms.REWRITES)), max_size=4, unique=True),
    stamped=st.booleans(),
    rebuilt=st.booleans(),
    unstamped=st.sampled_from([0, 0, 1, 2, 3]),
    dynamic=st.booleans(),
    data=st.data(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_any_subset_of_changes_can_be_made(
    model: Random,
    names: list[str],
    stamped: bool,
    rebuilt: bool,
    unstamped: int,
    dynamic: bool,
    data: st.DataObject,
) -> None:
    """Of every `unstamped`-th node the stamp is lost."""

    def transform(own: GraphModule) -> GraphModule:
        for name in names:
            own = transforms.REWRITES[name](own, stamped)
        own.recompile()
        number = {node: i for i, node in enumerate(own.graph.nodes)}
        return (
            rebuild(own, lambda n: unstamped > 0 and number[n] % unstamped == 0) if rebuilt else own
        )

    def chosen(changes: Any) -> list[Change]:
        return data.draw(st.lists(st.sampled_from(changes), unique=True)) if changes else []

    check(exported(model, dynamic), transform, example(1, 5 if dynamic else 3), chosen)


class Function(nn.Module):
    """A function of tensors as a module, with parameters that it may use."""

    def __init__(self, function: Callable[..., Any], **state: Tensor | nn.Module) -> None:
        super().__init__()
        for name, value in state.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def exported_function(
    function: Callable[..., Any], *inputs: Tensor, train: bool = False, **state: Any
) -> GraphModule:
    torch.manual_seed(0)
    model = Function(function, **state).train(train)
    module = torch.export.export(model, inputs or (X,)).module(check_guards=False)
    assert isinstance(module, GraphModule)
    return module


def changes_of(
    program: GraphModule, transform: transforms.Transform, *inputs: Tensor
) -> list[Change]:
    return list(check(program, transform, inputs or (X,)).changes)


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


class TestConstants:
    """Parameters, buffers, and what a pass adds to them."""

    def test_each_reads_by_the_name_it_had(self) -> None:
        """Tied weights under two names, a parameter that two operators read, and equal zeros."""
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        second.weight = first.weight
        for layer in (first, second):
            nn.init.zeros_(layer.bias)
        program = exported_function(
            lambda m, x: F.gelu(m.second(m.first(x)) + m.first.bias), first=first, second=second
        )
        assert len({n.target for n in program.graph.nodes if n.op == "get_attr"}) == 4

        def copied(own: GraphModule) -> GraphModule:
            """No memory in common either, and one read of what is equal."""
            after = rebuild(transforms.split_gelu(own))
            reads: dict[Any, Node] = {}
            for node in [node for node in after.graph.nodes if node.op == "get_attr"]:
                value = get_attribute(after, str(node.target)).detach().clone()
                set_attribute(after, str(node.target), value)
                first = reads.setdefault(str(value.tolist()), node)
                node.replace_all_uses_with(first)
            after.graph.lint()
            return after

        for transform in (copied, lambda own: rebuild(transforms.split_gelu(own))):
            alignment, before, after = aligned(program, transform)
            check_names(alignment, before, after)
            assert [change.nodes for change in alignment.changes] == [("gelu",)]

    def test_pieces_read_those_of_their_operator(self) -> None:
        """Of several that are equal, where memory does not tell which is which."""
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for layer in (first, second):
            nn.init.zeros_(layer.bias)
        program = exported_function(lambda m, x: m.second(m.first(x)), first=first, second=second)

        def transform(own: GraphModule) -> GraphModule:
            after = rebuild(transforms.split_linear(own))
            for node in [node for node in after.graph.nodes if node.op == "get_attr"]:
                value = get_attribute(after, str(node.target)).detach().clone()
                set_attribute(after, str(node.target), value)
            return after

        _, _, after = aligned(program, transform)
        assert edges(after)["linear"] == ("linear_matmul", "first_bias")
        assert edges(after)["linear_1"] == ("linear_1_matmul", "second_bias")

    def test_pieces_read_what_nothing_read_any_longer(self) -> None:
        """A piece may read a parameter of which the program forgot that it has it."""
        program = exported_function(
            lambda m, x: (x + m.linear.bias, x.sin()), linear=nn.Linear(WIDTH, WIDTH)
        )

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            bias = next(node for node in own.graph.nodes if node.target == "linear.bias")
            zero = insert(site, aten.mul.Tensor, bias, 0.0)
            replace(
                site, insert(site, aten.add.Tensor, insert(site, *(site.target, *site.args)), zero)
            )
            return own

        alignment, before, _ = aligned(program, transform)
        working = copy_graph_module(program)
        (add,) = sites(working, aten.add.Tensor)
        replace(add, add.args[0])  # type: ignore[arg-type]
        alignment.apply(refresh(working), alignment.changes)
        assert edges(working)["sin_mul"] == ("linear_bias",)
        torch.testing.assert_close(run(working, (X,))[1], run(before, (X,))[1])

    def test_pieces_read_the_parameters_of_the_program(self) -> None:
        program = exported_function(lambda m, x: m.linear(x), linear=nn.Linear(WIDTH, WIDTH))
        alignment, _, _ = aligned(program, lambda own: rebuild(transforms.split_linear(own)))
        working = applied(program, alignment, alignment.changes)
        stored = dict(program.named_parameters())
        assert dict(working.named_parameters()).keys() == stored.keys()
        for path, parameter in working.named_parameters():
            assert parameter.data_ptr() == stored[path].data_ptr()

    def test_pieces_read_them_where_they_are_now(self) -> None:
        program = exported_function(lambda m, x: m.linear(x), linear=nn.Linear(WIDTH, WIDTH))
        alignment, before, _ = aligned(program, transforms.split_linear)
        working = copy_graph_module(program)
        for node in sites(working, aten.linear.default)[0].all_input_nodes[1:]:
            value = get_attribute(working, str(node.target))
            node.target = f"elsewhere.{node.name}"
            set_attribute(working, node.target, value)
        alignment.apply(working, alignment.changes)
        assert {n.target for n in working.graph.nodes if n.op == "get_attr"} == {
            "elsewhere.linear_weight",
            "elsewhere.linear_bias",
        }
        torch.testing.assert_close(run(working, (X,)), run(before, (X,)))

    def test_new_ones_are_stored_beside_what_is_there(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            return transforms.scalars_to_constants(own)

        program = exported_function(lambda m, x: (x + 2.0).sin() + 3.0)
        working = copy_graph_module(program)
        set_attribute(working, "_tensor_constant0", torch.tensor(7.0))
        alignment, _, after = aligned(program, transform)
        alignment.apply(working, alignment.changes)
        assert edges(working)["add"] == ("inputs_0", "add_tensor_constant0")
        torch.testing.assert_close(run(working, (X,)), run(after, (X,)))
        assert get_attribute(working, "_tensor_constant0") == 7

    def test_one_that_two_places_read(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            value = constant(own, next(iter(own.graph.nodes)), torch.tensor(2.0))
            for site in sites(own, aten.add.Tensor):
                site.args = (site.args[0], value)
            return own

        program = exported_function(lambda m, x: (x + 2.0).sin() + 2.0)
        alignment, _, after = aligned(program, transform)
        assert [change.nodes for change in alignment.changes] == [("add",), ("add_1",)]
        assert edges(after)["add_1"] == ("sin", "add_1_tensor_constant0")
        check(program, transform, (X,))

    def test_one_in_place_of_operators(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.arange.default)
            replace(site, constant(own, site, torch.arange(WIDTH)))
            return own

        program = exported_function(lambda m, x: (x + torch.arange(WIDTH), torch.arange(WIDTH)))
        inner = exported_function(lambda m, x: x.sin() + torch.arange(WIDTH))
        assert changes_of(inner, transform)[0].nodes == ("arange", "add")

        def both(own: GraphModule) -> GraphModule:
            for site in sites(own, aten.arange.default):
                replace(site, constant(own, site, torch.arange(WIDTH)))
            return own

        assert [c.nodes for c in changes_of(program, both)] == [("arange", "add"), ("arange_1",)]

    def test_one_that_was_written_to(self) -> None:
        """As a pass does that replaces -inf by a large number: what follows does not differ."""

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.add.Tensor)
            site.args = (site.args[0], constant(own, site, mask.nan_to_num(neginf=-255.0)))
            return own

        mask = torch.zeros(WIDTH).masked_fill(torch.arange(WIDTH) > 3, float("-inf"))
        program = exported_function(
            lambda m, x: (x + m.mask).softmax(1).sin(), mask=nn.Buffer(mask)
        )
        alignment = check(program, transform, (X,))
        assert [c.nodes for c in alignment.changes] == [
            ("add", "softmax")
        ] and not alignment.unproven


class TestMemory:
    """Operators that write, or whose results depend on more than what they read."""

    def test_writes_stay_in_their_order(self) -> None:
        """A row is written between two reads of it; what concerns it is one place."""

        def function(module: nn.Module, x: Tensor) -> Any:
            y = x.sin()
            early = y + 1.0
            y[0] = 0.5
            return early, y.exp(), F.gelu(x)

        program = exported_function(function)
        alignment = check(program, transforms.scalars_to_constants, (X,))
        assert "exp" in alignment.changes[0].nodes and "add" in alignment.changes[0].nodes
        (change,) = check(program, transforms.split_gelu, (X,)).changes
        assert change.nodes == ("gelu",)

    def test_an_operator_in_place(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            for site in sites(own, aten.relu_.default):
                replace(site, insert(site, aten.relu.default, site.args[0]))
            return own

        program = exported_function(lambda m, x: F.relu_(x.sin()).exp())
        assert changes_of(program, transform) == [Change(("relu_",), ("relu_",))]

    def test_what_moves_keeps_that_order(self) -> None:
        """The write waits for a piece that stands behind a read of what is written: so must that read."""

        def transform(own: GraphModule) -> GraphModule:
            (tan,), (cos,) = sites(own, aten.tan.default), sites(own, aten.cos.default)
            tan.prepend(cos)
            zero = insert(tan, aten.mul.Tensor, cos, 0.0)
            replace(
                tan, insert(tan, aten.add.Tensor, insert(tan, aten.tan.default, *tan.args), zero)
            )
            return own

        def function(module: nn.Module, x: Tensor) -> Any:
            other, y = x.tan(), x.sin()
            y[0] = other[0]
            return y.exp(), x.cos()

        (change,) = changes_of(exported_function(function), transform)
        assert change.nodes == ("tan",)

    def test_buffers_are_not_written_to(self) -> None:
        """Statistics of a batch norm in training mode are updated when it runs."""

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.batch_norm.default)
            copy = insert(site, aten.batch_norm.default, *site.args)
            replace(site, insert(site, aten.clone.default, copy))
            return own

        images = torch.randn(4, 3, 5, 5)
        program = exported_function(
            lambda m, x: m.norm(x).relu(), images, norm=nn.BatchNorm2d(3), train=True
        )
        state = {name: value.clone() for name, value in program.state_dict().items()}
        alignment, _, _ = aligned(program, transform)
        assert alignment.changes[0].nodes[-1] == "batch_norm" and not alignment.unproven
        for name, value in program.state_dict().items():
            assert torch.equal(value, state[name])

    def test_random_numbers_are_drawn_as_before(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.dropout.default)
            site.args = (insert(site, aten.clone.default, site.args[0]), *site.args[1:])
            return own

        program = exported_function(
            lambda m, x: [y := x.sin(), F.dropout(y, 0.5, m.training).exp(), y.cos()], train=True
        )
        state = torch.get_rng_state()
        alignment, _, _ = aligned(program, transform)
        assert torch.equal(torch.get_rng_state(), state)
        assert [c.nodes for c in alignment.changes] == [("dropout",)] and not alignment.unproven


def two_branches(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin().relu(), lambda x: x.cos(), (x.exp(),)).tanh()


class TestBodies:
    """Control flow: bodies are compared node by node."""

    def test_a_changed_body_changes_its_call(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, torch.ops.higher_order.cond)
            body = get_attribute(own, str(site.args[1].target))  # type: ignore[union-attr]
            (relu,) = sites(body, aten.relu.default)
            replace(relu, insert(relu, aten.clamp.default, relu.args[0], 0.0))
            body.recompile()
            return own

        program = exported_function(two_branches)
        (change,) = changes_of(program, transform)
        assert "cond" in change.nodes and "tanh" not in change.nodes
        alignment, _, _ = aligned(program, transform)
        first, second = (applied(program, alignment, [change]) for _ in range(2))
        read = next(n for n in first.graph.nodes if n.name == "cond_true_graph_0")
        bodies = [get_attribute(module, str(read.target)) for module in (first, second)]
        assert bodies[0] is not bodies[1], "an edit of one would be one of the other"

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


class TestSizes:
    """Symbolic sizes."""

    @pytest.mark.filterwarnings("ignore:Raw SymInt value")  # of what the transform does
    def test_a_symbol_among_the_arguments(self) -> None:
        """Passes that trace anew leave symbols where nodes were: such a program cannot even be run."""

        def transform(own: GraphModule) -> GraphModule:
            for site in sites(own, aten.sin.default):
                size = value_of(site).shape[0]
                flat = insert(site, aten.reshape.default, site.args[0], [size * WIDTH])
                turned = insert(site, aten.sin.default, flat)
                replace(site, insert(site, aten.reshape.default, turned, [size, WIDTH]))
            for site in sites(own, aten.reshape.default)[2:]:
                site.args = (site.args[0], [value_of(site).shape[0], *site.args[1][1:]])  # type: ignore[index]
            return own

        batch = torch.export.Dim("batch", max=64)
        model = Function(lambda m, x: x.sin().exp().reshape(x.shape[0], 2, -1))
        shapes = {"inputs": ({0: batch},)}
        program = torch.export.export(model, (X,), dynamic_shapes=shapes).module(check_guards=False)
        assert isinstance(program, GraphModule)
        alignment, before, after = aligned(program, transform)
        assert [change.nodes for change in alignment.changes] == [("sin",)]
        assert edges(after)["reshape"] == ("exp",), "the symbol is what the node gave"
        working = applied(program, alignment, alignment.changes)
        kinds = {node.name: value_of(node) for node in working.graph.nodes}
        assert (
            kinds["sin_reshape"].dim() == 1 and kinds["sin_sin"].shape == kinds["sin_reshape"].shape
        )
        for count in (2, 7):
            inputs = (torch.randn(count, WIDTH),)
            torch.testing.assert_close(run(working, inputs), run(before, inputs))

    def test_they_stay_symbolic(self) -> None:
        """An average pool has no kernel for symbols where torch.export does not ask for one."""

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.adaptive_avg_pool2d.default)
            cut = insert(site, aten.slice_copy.Tensor, site.args[0], 2, 0, 8)
            replace(site, insert(site, aten.avg_pool2d.default, cut, [8, 8], [1, 1]))
            return own

        images = torch.randn(4, 3, 8, 8)
        model = Function(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1))
        shapes = {"inputs": ({0: torch.export.Dim("batch", max=64)},)}
        program = torch.export.export(model, (images,), dynamic_shapes=shapes)
        module = program.module(check_guards=False)
        assert isinstance(module, GraphModule)
        alignment, before, _ = aligned(module, transform)
        working = applied(module, alignment, alignment.changes)
        for graph in (before.graph, working.graph):
            sizes = [value_of(node).shape[0] for node in graph.nodes if node.op != "output"]
            assert len(sizes) > 2 and not any(size.node.expr.is_number for size in sizes)

    def test_a_symbol_that_nothing_gives(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            other = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
            replace(site, insert(site, aten.narrow.default, site.args[0], 0, 0, other))
            return own

        program = exported_function(lambda m, x: x.sin().sum())
        with pytest.warns(UserWarning, match="Raw SymInt"):
            alignment, _, _ = aligned(program, transform)
        with pytest.raises(UserError, match="wrote u0 into an operator in place of sin, sum_1"):
            alignment.apply(copy_graph_module(program), alignment.changes)


class TestShape:
    """Regions are such that every mixture of changes has an order and runs."""

    def test_no_path_leaves_a_place_and_comes_back(self) -> None:
        """The removed clone has two readers, and one of them reads the other through an exp."""
        program = exported_function(
            lambda m, x: [y := x.sin(), z := y.clone(), (z + 1.0).exp() + z, y.cos()][2:]
        )
        (change,) = changes_of(program, transforms.drop_identities)
        assert change.nodes == ("clone", "add", "exp", "add_1")

    def test_pieces_that_read_what_comes_later(self) -> None:
        """The pieces read a value that stands behind readers of the operator."""

        def transform(own: GraphModule) -> GraphModule:
            (sin,), (cos,) = sites(own, aten.sin.default), sites(own, aten.cos.default)
            sin.prepend(cos)
            zero = insert(sin, aten.mul.Tensor, cos, 0.0)
            replace(
                sin, insert(sin, aten.add.Tensor, insert(sin, aten.sin.default, sin.args[0]), zero)
            )
            return own

        program = exported_function(lambda m, x: (x.sin().exp(), x.cos()))
        (change,) = changes_of(program, transform)
        assert change.nodes == ("sin",)

    def test_other_strides_where_a_view_follows(self) -> None:
        """A view of the operator's result is a view of what stands for it, in every mixture."""

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            turned = insert(site, aten.permute.default, site.args[0], [1, 0])
            sin = insert(site, aten.sin.default, insert(site, aten.contiguous.default, turned))
            replace(site, insert(site, aten.permute.default, sin, [1, 0]))
            (view,) = sites(own, aten.view.default)
            replace(view, insert(view, aten.reshape.default, *view.args))
            return own

        program = exported_function(lambda m, x: x.sin().exp().view(2, 12).cos())
        (change,) = changes_of(program, transform)
        assert change.nodes == ("sin", "exp", "view")
        loose = exported_function(lambda m, x: [x.sin().exp().sum(), x.view(2, 12)][0])
        assert changes_of(loose, transform_without_view(transform))[0].nodes == ("sin",)


def transform_without_view(transform: transforms.Transform) -> transforms.Transform:
    def transformed(own: GraphModule) -> GraphModule:
        return transform(own)

    return transformed


class TestUnproven:
    """Transforms that do not compute the same."""

    def test_the_place_is_no_larger_for_it(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            replace(site, insert(site, aten.cos.default, site.args[0]))
            return transforms.scalars_to_constants(transforms.split_gelu(own))

        def function(module: nn.Module, x: Tensor) -> Any:
            before = x + 2.0
            return F.gelu(before.sin()) + 3.0, before * 4.0

        program = exported_function(function)
        alignment, before, after = aligned(program, transform)
        check_names(alignment, before, after)
        _, wrong, *_ = alignment.changes
        assert [c.nodes for c in alignment.changes] == [
            ("add",),
            ("sin",),
            ("gelu",),
            ("add_1",),
            ("mul",),
        ]
        assert alignment.unproven == (wrong,) and wrong.pieces == ("sin",)
        rest = [change for change in alignment.changes if change != wrong]
        torch.testing.assert_close(run(applied(program, alignment, rest), (X,)), run(before, (X,)))
        whole = run(applied(program, alignment, alignment.changes), (X,))
        assert all(map(torch.equal, whole, run(after, (X,))))

    def test_it_does_not_try_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A place that has grown by some operators in vain grows by all at once."""
        runs = itertools.count()

        def counted(*arguments: Any) -> Any:
            next(runs)
            return equivalence.unequal(*arguments)

        monkeypatch.setattr(settling, "unequal", counted)

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.exp.default)
            replace(site, insert(site, aten.tan.default, site.args[0]))
            return own

        def function(module: nn.Module, x: Tensor) -> Tensor:
            x = x.exp()
            for _ in range(19):
                x = x.sin()
            return x

        program = exported_function(function)
        alignment, _, _ = aligned(program, transform)
        assert alignment.unproven == alignment.changes == (Change(("exp",), ("exp",)),)
        assert next(runs) < 9

    def test_operators_that_cannot_be_run(self) -> None:
        library = torch.library.Library("alignment_test", "FRAGMENT")
        library.define("absent(Tensor x) -> Tensor")

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            replace(site, insert(site, torch.ops.alignment_test.absent.default, site.args[0]))
            return own

        program = exported_function(lambda m, x: (x.sin().exp(), x.cos()))
        alignment, _, after = aligned(program, transform)
        assert alignment.unproven == alignment.changes == (Change(("sin",), ("sin",)),)
        assert edges(after)["output"] == ("exp", "cos")


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


class TestApply:
    """What comes into the program."""

    def test_pieces_carry_what_exported_operators_carry(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            own = rebuild(transforms.split_gelu(own))
            for node in own.graph.nodes:
                node.meta.pop("val", None)
                node.meta.pop("nn_module_stack", None)
                node.meta["mark"] = "theirs"
            return own

        program = exported_function(lambda m, x: m.act(x.sin()), act=nn.GELU())
        alignment, _, _ = aligned(program, transform)
        working = applied(program, alignment, alignment.changes)
        mode = value_of(sites(working, aten.sin.default)[0]).fake_mode
        stack = sites(program, aten.gelu.default)[0].meta["nn_module_stack"]
        for name in alignment.changes[0].pieces:
            piece = next(node for node in working.graph.nodes if node.name == name)
            assert piece.meta["val"].shape == (4, WIDTH) and piece.meta["val"].fake_mode is mode
            assert piece.meta["nn_module_stack"] == stack and piece.meta["mark"] == "theirs"
            assert tag_of(piece, "stamp") is None and tag_of(piece, "source") == "gelu"
            assert tag_of(piece, "origin") == "aten.gelu.default"

    def test_later_edits_of_the_transformed_program_do_not_reach_it(self) -> None:
        program = exported_function(lambda m, x: F.gelu(x))
        alignment, before, after = aligned(program, transforms.split_gelu)
        for node in sites(after, aten.erf.default):
            node.target, node.meta["quantization_annotation"] = aten.sin.default, node
        working = applied(program, alignment, alignment.changes)
        torch.testing.assert_close(run(working, (X,)), run(before, (X,)))

    def test_annotations_stay_with_the_member(self) -> None:
        def transform(own: GraphModule) -> GraphModule:
            for node in transforms.split_gelu(own).graph.nodes:
                node.meta["quantization_annotation"] = node
            return own

        program = exported_function(lambda m, x: F.gelu(x))
        alignment, _, _ = aligned(program, transform)
        working = applied(program, alignment, alignment.changes)
        assert not any("quantization_annotation" in node.meta for node in working.graph.nodes)

    def test_changes_of_two_transforms(self) -> None:
        """Each stands on the program as it was; both are made in one."""
        program = exported_function(
            lambda m, x: F.gelu(m.linear(x)) + 2.0, linear=nn.Linear(WIDTH, WIDTH)
        )
        made = [
            aligned(program, transform)[0]
            for transform in (
                transforms.split_gelu,
                transforms.split_linear,
                transforms.scalars_to_constants,
            )
        ]
        expected = run(program, (X,))
        for order in itertools.permutations(made):
            working = copy_graph_module(program)
            for alignment in order:
                alignment.apply(working, alignment.changes)
            working.graph.lint()
            torch.testing.assert_close(run(working, (X,)), expected)
            assert edges(working)["gelu_mul"] == ("linear",)

    def test_a_change_of_another_alignment(self) -> None:
        program = exported_function(lambda m, x: F.gelu(x))
        alignment, _, _ = aligned(program, transforms.split_gelu)
        with pytest.raises(InternalError, match="no change of this transform"):
            alignment.apply(copy_graph_module(program), [Change(("gelu",), ())])

    def test_a_change_that_was_made(self) -> None:
        program = exported_function(lambda m, x: F.gelu(x).exp())
        alignment, _, _ = aligned(program, transforms.drop_identities)
        assert alignment.changes == ()
        alignment, _, _ = aligned(program, transforms.split_gelu)
        working = copy_graph_module(program)
        alignment.apply(working, alignment.changes)
        with pytest.raises(InternalError, match="called gelu_"):
            alignment.apply(working, alignment.changes)

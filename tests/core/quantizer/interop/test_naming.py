# SPDX-License-Identifier: Apache-2.0
"""Constants of a transformed program: whose they are, and what they are called."""

from __future__ import annotations

from typing import Any

import torch
from qompose.program.graph import copy_graph_module, get_attribute, refresh, set_attribute
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import (
    X,
    aligned,
    applied,
    changes_of,
    check,
    check_names,
    edges,
    exported_function,
    run,
)
from tests.core.quantizer.interop.programs import WIDTH
from tests.core.quantizer.interop.transforms import constant, insert, rebuild, replace, sites

aten = torch.ops.aten


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

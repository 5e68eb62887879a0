# SPDX-License-Identifier: Apache-2.0
"""Places are such that every mixture of changes has an order, and runs."""

from __future__ import annotations

from typing import Any

import torch
from qompose.spec.claim import Change
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import (
    X,
    aligned,
    changes_of,
    check,
    exported_function,
)
from tests.core.quantizer.interop.transforms import insert, replace, sites

aten = torch.ops.aten


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

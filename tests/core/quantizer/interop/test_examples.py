# SPDX-License-Identifier: Apache-2.0
"""Example values and symbolic sizes of what a transform made."""

from __future__ import annotations

import pytest
import torch
from qompose.errors import UserError
from qompose.program.graph import copy_graph_module, value_of
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.nn import functional as F

from tests.core.quantizer.interop.aligning import (
    Function,
    X,
    aligned,
    applied,
    edges,
    exported_function,
    run,
)
from tests.core.quantizer.interop.programs import WIDTH
from tests.core.quantizer.interop.transforms import insert, replace, sites

aten = torch.ops.aten


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
        """A slice that is copied takes numbers alone, unless it is run as torch.export does it.

        Narrowing asks for as many rows, which is nothing that the user's program asks for.
        """

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.adaptive_avg_pool2d.default)
            cut = insert(site, aten.slice_copy.Tensor, site.args[0], 2, 0, 8)
            insert(site, aten.narrow.default, cut, 0, 0, 3)
            replace(site, insert(site, aten.avg_pool2d.default, cut, [8, 8], [1, 1]))
            return own

        images = torch.randn(4, 3, 8, 8)
        model = Function(lambda m, x: F.adaptive_avg_pool2d(x, 1).flatten(1))
        shapes = {"inputs": ({0: torch.export.Dim("batch", max=64)},)}
        program = torch.export.export(model, (images,), dynamic_shapes=shapes)
        module = program.module(check_guards=False)
        assert isinstance(module, GraphModule)
        (batch, *_) = value_of(next(iter(module.graph.nodes))).shape
        guards = len(batch.node.shape_env.guards)
        alignment, before, _ = aligned(module, transform)
        assert len(batch.node.shape_env.guards) == guards
        working = applied(module, alignment, alignment.changes)
        for graph in (before.graph, working.graph):
            nodes = [n for n in graph.nodes if n.op != "output" and n.target != aten.narrow.default]
            values = {node.name: value_of(node) for node in nodes}
            assert len(values) > 2
            assert not any(value.shape[0].node.expr.is_number for value in values.values())
        assert values["adaptive_avg_pool2d_slice_copy"].shape[1:] == (3, 8, 8)

    def test_a_symbol_that_a_transform_invents(self) -> None:
        """A pass that traces anew may give dimensions of buffers symbols; they are numbers still."""

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            mode = value_of(site).fake_mode
            other = mode.from_tensor(
                X.clone(),
                source=torch._dynamo.source.ConstantSource("invented"),
                symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]),
            )
            site.target, site.meta["val"] = aten.cos.default, other
            new = insert(site, aten.add.Tensor, site.args[0], torch.pi / 2)
            new.meta["val"] = other
            site.args = (insert(site, aten.neg.default, insert(site, aten.neg.default, new)),)
            return own

        batch = torch.export.Dim("batch", max=64)
        model = Function(lambda m, x, y: (x.sin(), y.exp().sum()))
        shapes = {"inputs": (None, {0: batch})}
        program = torch.export.export(model, (X, X.clone()), dynamic_shapes=shapes)
        module = program.module(check_guards=False)
        assert isinstance(module, GraphModule)
        alignment, _, _ = aligned(module, transform)
        working = applied(module, alignment, alignment.changes)
        assert value_of(sites(working, aten.add.Tensor)[0]).shape == X.shape

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

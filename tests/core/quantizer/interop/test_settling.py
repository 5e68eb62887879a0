# SPDX-License-Identifier: Apache-2.0
"""Places that do not compute what was there, and those that do after all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from qompose.program.graph import value_of
from qompose.quantizer.interop import equivalence, settling
from qompose.spec.claim import Change
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from tests.core.quantizer.interop import transforms
from tests.core.quantizer.interop.aligning import (
    X,
    aligned,
    applied,
    check,
    check_names,
    edges,
    exported_function,
    run,
)
from tests.core.quantizer.interop.programs import WIDTH
from tests.core.quantizer.interop.transforms import insert, replace, sites

aten = torch.ops.aten


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

    def test_what_comes_right_far_behind_is_proven(self) -> None:
        """Odd functions of a negated value, and then an even one."""

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.exp.default)
            replace(site, insert(site, aten.neg.default, insert(site, site.target, site.args[0])))
            return own

        def function(module: nn.Module, x: Tensor) -> Tensor:
            x = x.exp()
            for _ in range(settling.GROWTH + 2):
                x = x.sin()
            return x.cos().relu()

        program = exported_function(function)
        alignment = check(program, transform, (X,))
        assert not alignment.unproven
        (change,) = alignment.changes
        assert len(change.nodes) == settling.GROWTH + 5
        assert change.pieces[:3] == ("exp_exp", "exp_neg", "sin_sin")

    def test_recorded_values_of_another_mode(self) -> None:
        """What cannot be run anew has the value that the transform recorded, in the program's mode."""
        library = torch.library.Library("alignment_test", "FRAGMENT")
        library.define("unknown(Tensor x) -> Tensor")

        def transform(own: GraphModule) -> GraphModule:
            (site,) = sites(own, aten.sin.default)
            new = insert(site, torch.ops.alignment_test.unknown.default, site.args[0])
            with torch._subclasses.FakeTensorMode():
                new.meta["val"] = torch.empty(WIDTH, len(X)).t()
            replace(site, new)
            return own

        program = exported_function(lambda m, x: x.sin().exp())
        alignment, before, _ = aligned(program, transform)
        value = value_of(
            sites(applied(program, alignment, alignment.changes), aten.exp.default)[0].args[0]
        )  # type: ignore[arg-type]
        assert value.fake_mode is value_of(next(iter(before.graph.nodes))).fake_mode
        assert (value.shape, value.stride()) == ((len(X), WIDTH), (1, len(X)))

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

# SPDX-License-Identifier: Apache-2.0
"""What a member lets torch assume of symbolic sizes is taken back, and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning
from qompose.quantizer.interop.sandbox import sizes_kept
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import Foreign, aten, calls
from tests.core.toy import plan_of, prepare, randn, seeded

HEIGHT, WIDTH = "L['x'].size()[2]", "L['x'].size()[3]"


class Picture(nn.Module):
    """A convolution of pictures of any height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


def program() -> ExportedProgram:
    sizes = {2: Dim.AUTO, 3: Dim.AUTO}
    return torch.export.export(seeded(Picture()), (randn(1, 3, 16, 16),), dynamic_shapes=(sizes,))


def sides(model: GraphModule) -> tuple[Any, Any]:
    (x,) = model.graph.find_nodes(op="placeholder")
    return x.meta["val"].shape[2:]


def is_square(model: GraphModule) -> None:
    height, width = sides(model)
    assert height == width


def is_sixteen_high(model: GraphModule) -> None:
    assert int(sides(model)[0]) == 16


def is_checked(model: GraphModule) -> None:
    torch._check(sides(model)[0] <= 20)


ASSUMPTIONS: dict[str, tuple[Callable[[GraphModule], None], tuple[str, ...]]] = {
    "equal": (is_square, (HEIGHT, WIDTH)),
    "a number": (is_sixteen_high, (HEIGHT, "16")),
    "a bound": (is_checked, (HEIGHT, "20")),
}
OTHER = (1, 3, 24, 12)
"""A shape that each of the assumptions excludes."""

HOOKS = ("transform_for_annotation", "annotate", "validate", "prepare_obs_or_fq_callback")


def member(hook: str, ask: Callable[[GraphModule], None]) -> Foreign:
    class Asking(Foreign):
        targets = (aten.relu.default,)

    def asking(self: Any, model: GraphModule, *rest: Any) -> Any:
        ask(model)
        return getattr(Foreign, hook)(self, model, *rest)

    setattr(Asking, hook, asking)
    return Asking()


@pytest.mark.parametrize("name", ASSUMPTIONS)
@pytest.mark.parametrize("hook", HOOKS[:3])
def test_the_users_program_takes_what_it_took(hook: str, name: str) -> None:
    ask, words = ASSUMPTIONS[name]
    exported = program()
    prepared = prepare(exported, qompose.compose(member(hook, ask), Foreign()))
    x = randn(*OTHER)
    assert torch.equal(prepared(x), exported.module()(x))
    (note,) = (n for n in plan_of(prepared).notes if "lets torch assume" in n)
    assert note.startswith("tests.Asking lets torch assume ")
    assert all(word in note for word in words), note


def test_of_the_callback_a_warning_tells() -> None:
    exported = program()
    with pytest.warns(QomposeWarning, match=r"tests\.Asking: prepare_obs_or_fq_callback let torch"):
        qompose.prepare_pt2e(exported, qompose.compose(member(HOOKS[3], is_square)))
    exported.module()(randn(*OTHER))


def test_what_follows_from_the_program_is_not_told() -> None:
    def ask(model: GraphModule) -> None:
        height, _ = sides(model)
        assert height >= 2 and height * 2 != 1

    prepared = prepare(program(), qompose.compose(member("annotate", ask)))
    assert not [note for note in plan_of(prepared).notes if "assume" in note]


def test_what_is_asked_again_is_assumed_again() -> None:
    """Nothing that torch remembers of the question stands in the place of a guard."""
    exported = program()
    model = exported.module(check_guards=False)
    with sizes_kept(model) as first:
        is_square(model)
    with sizes_kept(model) as second:
        is_square(model)
    assert first == second != []
    is_square(model)  # now by the user
    with pytest.raises(AssertionError, match="Guard failed"):
        exported.module()(randn(*OTHER))


def test_it_is_taken_back_where_the_block_raises() -> None:
    exported = program()
    model = exported.module(check_guards=False)
    with pytest.raises(KeyError), sizes_kept(model):
        is_square(model)
        raise KeyError
    exported.module()(randn(*OTHER))


def test_symbols_that_a_block_makes_are_known_afterwards() -> None:
    """A transform may make operators whose results have sizes of their own."""
    model = program().module(check_guards=False)
    (relu,) = calls(model, aten.relu.default)
    value = relu.meta["val"]
    with sizes_kept(model) as assumed, value.fake_mode:
        found = torch.nonzero(value)
        is_square(model)
    assert len(assumed) == 1
    assert str(found.shape[0] + 1) and (found.shape[0] >= 0)
    symbol = found.shape[0].node.expr
    assert symbol in value.fake_mode.shape_env.var_to_range

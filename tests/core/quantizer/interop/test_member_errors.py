# SPDX-License-Identifier: Apache-2.0
"""Errors of members that say little themselves: where they were raised, about which part of a program."""

from __future__ import annotations

from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.errors import MemberError
from torch import nn
from torch.fx import GraphModule

from tests.core.quantizer.interop.foreign import Foreign, aten, calls
from tests.core.quantizer.interop.gallery import PROGRAM, X
from tests.core.quantizer.interop.test_member_hooks import HOOKS, Acting, Other, arrangements
from tests.core.toy import export, prepare


def _failing() -> None:
    """Fail in a function of torch, and do not say why."""
    torch._assert(False, "")


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_without_a_text_has_its_line(hook: str) -> None:
    line = _failing.__code__.co_firstlineno + 2
    for chosen in arrangements(Acting(hook, _failing)):
        with pytest.raises(MemberError) as caught:
            prepare(PROGRAM, qompose.compose(*chosen))
        place = f"interop/test_member_errors.py:{line}"
        assert str(caught.value) == f"tests.Acting: {hook} raised AssertionError at {place}"


def test_an_error_about_a_body_names_it() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, torch.tanh, torch.neg, (x,))

    class Refusing(Foreign):
        def annotate(self, model: GraphModule) -> None:
            if calls(model, aten.neg.default):
                raise ValueError("no neg here")

    class Silent(Refusing):
        def annotate(self, model: GraphModule) -> Any:
            return 3 if calls(model, aten.neg.default) else None

    program = export(Branches(), X)
    for member, what in (
        (Refusing(), "raised ValueError: no neg here"),
        (Silent(), "would be lost.*"),
    ):
        with pytest.raises(UserError, match=rf"{what} \(in false_graph_0 of cond\)$"):
            prepare(program, qompose.compose(Other(), member))


@pytest.mark.parametrize("copied", [None, "a text"], ids=str)
def test_a_copy_that_is_no_quantizer(copied: Any) -> None:
    class Lost(Foreign):
        def __deepcopy__(self, memo: Any) -> Any:
            return copied

    for chosen in arrangements(Lost()):
        with pytest.raises(
            UserError, match=r"tests\.Lost: copy\.deepcopy of it gives .*__deepcopy__"
        ):
            prepare(PROGRAM, qompose.compose(*chosen))

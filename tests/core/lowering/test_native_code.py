# SPDX-License-Identifier: Apache-2.0
"""C++ of backends is left out where nobody wants it, and where it does not compile."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import MemberError, UserError
from torch.fx import GraphModule

from tests.core.called_net import X, lowered_net
from tests.core.toy import LINEAR, ToyBackend

FACTOR = torch.tensor(2.0)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def fail(graph: GraphModule) -> Any:
    raise RuntimeError("x.cpp:3: error: no such word")


def with_code(plain: dict[str, Any], **facts: Any) -> GraphModule:
    """A model of a backend that is `plain` without C++ of its own."""
    other = ToyBackend((LINEAR,), "toy", **plain)
    return lowered_net(without_native_code=lambda: other, **facts)


@pytest.mark.parametrize("hook", ["compiler_options", "for_compiler"])
def test_what_does_not_compile_is_left_out_with_one_warning(hook: str) -> None:
    model = with_code({}, **{hook: fail})
    with pytest.warns(qompose.QomposeWarning, match="toy .*no such word") as said:
        compiled = qompose.compile_lowered(model)
    assert len(said) == 1
    torch.testing.assert_close(compiled(X, factor=FACTOR), model(X, factor=FACTOR))


def test_without_it_the_error_is_that_of_the_program() -> None:
    def without(graph: GraphModule) -> Any:
        raise RuntimeError("the other reason")

    with pytest.raises(MemberError, match="the other reason"):
        qompose.compile_lowered(with_code({"for_compiler": without}, for_compiler=fail))


@pytest.mark.parametrize("given", [{"native_code": False}, {}])
def test_it_can_be_turned_off(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QOMPOSE_NATIVE_CODE", "1" if given else "0")
    model = with_code({}, compiler_options=fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error", qompose.QomposeWarning)
        qompose.compile_lowered(model, **given)


def test_an_option_counts_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QOMPOSE_NATIVE_CODE", "0")
    asked: list[GraphModule] = []
    model = with_code({}, compiler_options=lambda graph: asked.append(graph) or {})
    qompose.compile_lowered(model, native_code=True)
    assert len(asked) == 1


@pytest.mark.parametrize(("given", "variable"), [("no", "1"), (None, "off")])
def test_other_values_are_refused(
    given: Any, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QOMPOSE_NATIVE_CODE", variable)
    with pytest.raises(UserError, match="no" if given else "off"):
        qompose.compile_lowered(lowered_net(), native_code=given)

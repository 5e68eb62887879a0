# SPDX-License-Identifier: Apache-2.0
"""What ExecuTorch refuses: the error names the operators, their modules, and what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import qompose
import torch
from qompose_xnnpack.executorch_target.errors import loading_error, lowering_error
from qompose_xnnpack.executorch_target.export import export
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from torch import Tensor, nn

from tests.core.toy import Model
from tests.sampling import at_once
from tests.xnnpack.executorch_target.runtime import QD, converted

pytest.importorskip("executorch")


def linear() -> nn.Module:
    return nn.Linear(4, 4)


BAGS = Model(lambda m, x: m.head(m.bags(x)), bags=nn.EmbeddingBag(10, 4, mode="sum"), head=linear())
BRANCHES = Model(
    lambda m, x: m.head(torch.cond(x.sum() > 0, lambda y: m.one(y), lambda y: m.two(y), (x,))),
    one=linear(), two=linear(), head=linear(),
)  # fmt: skip


def shared(m: Any, x: Tensor) -> Tensor:
    """A branch reads the parameters of what is before it."""
    return torch.cond(x.sum() > 0, lambda y: m.one(y), lambda y: y * 2, (m.one(x),))


def line(kind: type[nn.Module]) -> nn.Module:
    """Of two convolutions of one dimension, the second does not see the length."""
    return Model(
        lambda m, x: m.last(m.conv(x).mean(2, True)), conv=kind(3, 4, 3), last=kind(4, 4, 1)
    )


WORDS = torch.randint(10, (2, 3))
ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SIZES = ({0: torch.export.Dim("batch", max=4), 2: torch.export.Dim("length", min=4, max=9)},)
SAID: dict[str, tuple[nn.Module, list[Tensor], Any, str, str]] = {
    "no operator": (
        BAGS, [WORDS], None, "Operator torch._ops.aten._embedding_bag_forward_only.default is not in",
        r"aten\.embedding_bag in bags",
    ),
    "in bodies": (
        BRANCHES, [ROWS, -ROWS], None, "Node aten_linear_default: schema = aten::linear() was not",
        r"aten\.linear in one.*aten\.linear in two",
    ),
    "a constant": (
        Model(shared, one=linear()), [ROWS, -ROWS], None, "constant data node (b_zero_point_4) is tagged",
        r"because of zero_point_4",
    ),
    **{
        f"two sizes, {kind.__name__}": (
            line(kind), [torch.randn(2, 3, 8)], SIZES, "XNNPACK reshape only supports 1 dynamic dimension.",
            r"because of conv\w+ \(aten\.conv\w+ in conv\)(:| of method)",
        )
        for kind in (nn.Conv1d, nn.ConvTranspose1d)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", at_once(SAID, "no operator"))
def test_a_refusal_says_what_and_where_and_the_remedy(name: str) -> None:
    model, batches, sizes, _, named = SAID[name]
    with pytest.raises(qompose.errors.TargetError, match=named) as caught:
        qompose.lower(converted(model, *batches, sizes=sizes), "executorch")
    assert "'torch'" in str(caught.value), "the remedy"
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("name", SAID)
def test_what_executorch_says_is_told_by_the_users_names(name: str) -> None:
    """Its messages as version 1.5.1 has them; that it says so is shown on whole lowerings."""
    model, batches, sizes, said, named = SAID[name]
    exported = export(converted(model, *batches, sizes=sizes), (batches[0],), {}, sizes)
    error = str(lowering_error(RuntimeError(said), {"forward": exported}))
    assert re.search(named, error) and error.endswith(f"RuntimeError: {said}")
    several = lowering_error(RuntimeError(said), {"encode": exported, "decode": exported})
    assert all(f"of method {method!r}" in str(several) for method in ("encode", "decode"))


def test_a_sentence_that_breaks_off_is_left_out_and_others_are_not() -> None:
    for said, told in (
        ("Only 1. This may occur when ", "Only 1."),
        ("Only 1. Got 2", "Only 1. Got 2"),
        ("Only when ", "Only when"),
        ("First.\nSecond.\nThird when ", "First.\nSecond."),
        ("First.\nSecond\n", "First.\nSecond"),
    ):
        assert str(lowering_error(RuntimeError(said), {})).endswith(f"RuntimeError: {told}")
    four, five = (str(loading_error(RuntimeError(), "abcde"[:count])) for count in (4, 5))
    assert "a, b, c, d." in four and "a, b, c, d and 1 more." in five


def in_bytes(m: Any, x: Tensor) -> Tensor:
    """Rounds to uint8, which XNNPACK's partitioner takes around float operators; the runtime does not."""
    form = (0.02, 128, 0, 255, torch.uint8)
    for _ in range(2):
        q = QD.quantize_per_tensor.default(x, *form)
        x = QD.dequantize_per_tensor.default(q, *form).relu()
    return x


def test_what_the_runtime_refuses_names_the_operators_that_are_not_int8() -> None:
    model = Model(lambda m, x: m.inner(x) + x, inner=Model(in_bytes))
    graph = torch.export.export(model, (ROWS,)).module()
    with pytest.raises(qompose.errors.TargetError, match=r"aten\.relu\.default in inner"):
        lower_to_executorch(graph, (ROWS,))

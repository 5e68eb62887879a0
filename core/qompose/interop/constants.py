# SPDX-License-Identifier: Apache-2.0
"""What a quantizer writes to tensors of its copy of a program must not reach the user's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qompose.errors import UserError
from qompose.graph import get_attribute, owner_of, set_attribute
from qompose.nested import nodes_in


def own_constants(model: GraphModule) -> None:
    """Give a copy of a program its own buffers and constants, in place, which are small as a rule."""
    copies: dict[int, Tensor] = {}
    for node in nodes_in(model):
        value = get_attribute(owner_of(node), str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            copies.setdefault(id(value), value.clone())
            set_attribute(owner_of(node), str(node.target), copies[id(value)])


@contextmanager
def parameters_kept(model: GraphModule, who: str) -> Iterator[None]:
    """Check that a block writes to no parameter of a program; it shares them with the user's model.

    Raises:
        UserError: it did. What stood there is lost.
    """
    before = {name: _digest(value) for name, value in model.named_parameters()}
    parameters = dict(model.named_parameters())
    raised: Exception | None = None
    try:
        yield
    except Exception as error:  # the quantizer's; what it wrote before matters more
        raised = error
    written = [name for name, value in parameters.items() if _digest(value) != before[name]]
    if written:
        raise UserError(
            f"{who} wrote to parameters of the model in place: {', '.join(written)}. Their values are lost: "
            "make the model anew, and mend the quantizer; it may put new tensors into its own copy of the "
            f"program{f'. Then it failed: {raised}' if raised else ''}"
        ) from raised
    if raised is not None:
        raise raised


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _digest(parameter: Tensor) -> int:
    """Return a number that is another one, as good as certainly, where a value was changed."""
    bits = parameter.detach().view(_BITS.get(parameter.element_size(), torch.uint8))
    return int(bits.sum(dtype=torch.int64))

# SPDX-License-Identifier: Apache-2.0
"""What a quantizer writes to tensors of its copy of a program must not reach the user's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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
def tensors_kept(model: GraphModule, who: str, *, buffers: bool = False) -> Iterator[None]:
    """Check that a block writes to no parameter of a program; it shares them with the user's model.

    Args:
        buffers: check buffers and constants too, where they are not `own_constants`.

    Raises:
        UserError: it did. What stood there is lost.
    """
    tensors = {**dict(model.named_parameters()), **(dict(model.named_buffers()) if buffers else {})}
    before = {name: digest(value) for name, value in tensors.items()}
    raised: Exception | None = None
    try:
        yield
    except Exception as error:  # the quantizer's; what it wrote before matters more
        raised = error
    written = [name for name, value in tensors.items() if digest(value) != before[name]]
    if written:
        what = (
            "parameters"
            if all(isinstance(tensors[n], nn.Parameter) for n in written)
            else "tensors"
        )
        raise UserError(
            f"{who} wrote to {what} of the model in place: {', '.join(written)}. Their values are lost: "
            "make the model anew, and mend the quantizer; it may put new tensors into its own copy of the "
            f"program{f'. Then it failed: {raised}' if raised else ''}"
        ) from raised
    if raised is not None:
        raise raised


_WORD = 8
_CHUNK = 1 << 16
_MODULUS = (1 << 64) - 59  # a prime


def digest(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that is another one, as good as certainly, where a number was changed or moved.

    The bits are summed by 64 of them, each times an odd number of its place within a chunk; the sums of
    chunks are the digits of a number. One pass: 25 ms for 100 MB on one core.
    """
    facts = (tensor.dtype, tuple(tensor.shape))
    if tensor.is_meta or tensor.layout is not torch.strided:
        return facts
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % _WORD
    weights, total = _weights().to(flat.device), 0
    for chunk in torch.split(flat[:whole].view(torch.int64), _CHUNK):
        total = (total * _CHUNK + int((chunk * weights[: chunk.numel()]).sum())) % _MODULUS
    return (*facts, total, tuple(flat[whole:].tolist()))


@cache
def _weights() -> Tensor:
    """Return odd numbers, always the same: times each of them, different words stay different."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator, device="cpu") * 2 + 1

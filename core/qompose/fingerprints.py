# SPDX-License-Identifier: Apache-2.0
"""A hash of a model, by which statistics know for whose tensors they are."""

from __future__ import annotations

import hashlib
from itertools import chain

import torch
from torch import Tensor
from torch.fx import GraphModule

_VALUES = 64
"""How many values of a tensor are hashed: a look at each must not cost what a forward pass costs."""


def fingerprint(module: GraphModule) -> str:
    """Return a hash of the names, types, shapes and some values of a program's parameters and buffers.

    It does not depend on how the model was exported: for other sizes, or with dimensions left open.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(chain(module.named_parameters(), module.named_buffers())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_some_bytes(tensor))
    return digest.hexdigest()


def _some_bytes(tensor: Tensor) -> bytes:
    if not tensor.numel() or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter):
        return b""
    flat = tensor.detach().flatten()[:: max(1, tensor.numel() // _VALUES)][:_VALUES]
    return bytes(flat.cpu().contiguous().view(torch.uint8).numpy())

# SPDX-License-Identifier: Apache-2.0
"""The packed weights of oneDNN and of torch's kernels, kept beside the plain ones (`kit.WeightCache`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from qompose.backend import kit
from torch import Tensor

from qompose_x86_inductor.onednn import exactness
from qompose_x86_inductor.onednn.arguments import Geometry, Product
from qompose_x86_inductor.onednn.calls import Packed, prepack_convolution, prepack_linear
from qompose_x86_inductor.onednn.convolution_workarounds import safe_form

_CACHE = kit.WeightCache()
cached, owners = _CACHE.get, _CACHE.owners


def linear(weight: Tensor) -> Packed:
    """Return the packed form of an int8 linear weight (out, in)."""
    return _packed(weight, "linear", lambda: prepack_linear(weight))


def convolution(product: Product, geometry: Geometry) -> Packed:
    """Return the packed form of an int8 weight (out, in / groups, kh, kw) for a `Product.unsigned`.

    The image's height and width decide which kernel oneDNN packs for (on 1 x 1 kernels that is a
    third of the time), not what the result may be used with; those of the first image count.
    """
    form, placement = safe_form(product, geometry)

    def build() -> Tensor:
        return prepack_convolution(form, placement, [1, *form.x.shape[1:]])

    return _packed(product.weight, (form.x_zp, placement.key()), build)


def _packed(weight: Tensor, key: Hashable, build: Callable[[], Tensor]) -> Packed:
    def pack() -> Packed:
        zeros = torch.zeros(weight.shape[0], dtype=torch.int32, device="cpu")
        return Packed(build() if exactness.admits(weight) else None, zeros)

    return cached(weight, key, pack)

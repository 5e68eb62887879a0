# SPDX-License-Identifier: Apache-2.0
"""Equivalent forms of convolutions that oneDNN computes wrongly as they are.

Found by comparing random convolutions with integer sums, on processors with AMX and with VNNI alone
(oneDNN 3.12, in torch 2.13):

* a kernel of one pixel with a dilation may read outside of an image of one pixel, and end the
  process. Such a dilation has no effect, and is dropped;
* with AMX, a window that lies in the padding altogether, as it may with a dilation beside a narrow
  image, gets a share of the zero point. The zero points are put around the image;
* with AMX, a result that is one pixel wide is wrong where the stride is more than one. Its one
  window is cut out, and the stride is dropped;
* with AMX, the share of the zero point is right in the first group alone, where groups have more
  than 16 output channels, fewer than 32 input channels, and a kernel of several columns that lie
  side by side. The zero point goes into the border of the image and into the bias.

The forms do not depend on the processor: a graph may be compiled on one and run on another.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qompose_x86_inductor.onednn.arguments import Geometry, Product, image_shape

_TILE_ROWS: Final = 16
_WHOLE_DEPTH: Final = 32


def safe_form(product: Product, geometry: Geometry) -> tuple[Product, Geometry]:
    """Return a `Product.unsigned` and its geometry in a form that oneDNN computes correctly.

    Where the graph does not say whether the result is one pixel wide (its width is a symbol), the
    form's result has one column more, which the caller cuts off. A form is its own safe form.
    """
    if max(geometry.dilation) > 1:
        kernel = product.weight.shape[2:]
        dilation = [d if k > 1 else 1 for d, k in zip(geometry.dilation, kernel, strict=True)]
        geometry = geometry._replace(dilation=dilation)
    product, geometry = _unstrided(*_unpadded(product, geometry))
    return _without_zero_point(product, geometry)


def _unpadded(product: Product, geometry: Geometry) -> tuple[Product, Geometry]:
    sizes = zip(product.x.shape[2:], product.weight.shape[2:], *geometry[1:3], strict=True)
    if all(
        pad == 0 or (pad <= gap * (taps - 1) and statically_known_true(size >= gap))
        for size, taps, pad, gap in sizes
    ):
        return product, geometry
    return _around(product, geometry), geometry._replace(padding=[0, 0])


def _around(product: Product, geometry: Geometry) -> Product:
    """Return a product with all of its padding in the image."""
    above, beside = geometry.padding
    return _bordered(product, [beside, beside, above, above])


def _unstrided(product: Product, geometry: Geometry) -> tuple[Product, Geometry]:
    (down, across), (above, beside), dilation, _ = geometry
    if across == 1:
        return product, geometry
    width = image_shape(product, geometry)[3]
    if statically_known_true(width > 1):
        return product, geometry
    if not statically_known_true(width == 1):
        return _bordered(product, [0, across, 0, 0]), geometry
    window = dilation[1] * (product.weight.shape[3] - 1) + 1
    cut_out = _bordered(product, [beside, window - beside - product.x.shape[3], 0, 0])
    return cut_out, geometry._replace(stride=[down, 1], padding=[above, 0])


def _without_zero_point(product: Product, geometry: Geometry) -> tuple[Product, Geometry]:
    per_group, depth, _, columns = product.weight.shape
    per_group //= geometry.groups
    narrow = per_group <= _TILE_ROWS or depth >= _WHOLE_DEPTH
    apart = columns == 1 or geometry.dilation[1] > 1
    if product.x_zp == 0 or geometry.groups == 1 or narrow or apart:
        return product, geometry
    share = product.weight.sum((1, 2, 3), dtype=torch.int32) * product.x_zp
    bias = product.w_scale.double() * product.x_scale * -share
    bias = bias if product.bias is None else bias + product.bias
    moved = product._replace(x=_around(product, geometry).x, x_zp=0, bias=bias.to(torch.float32))
    return moved, geometry._replace(padding=[0, 0])


def _bordered(product: Product, border: list[int]) -> Product:
    """Put real zeros around the image, or cut it: left, right, above, below."""
    if not any(border):
        return product
    return product._replace(x=F.pad(product.x, border, value=product.x_zp))

# SPDX-License-Identifier: Apache-2.0
"""qompose's quantizers in NNCF's `quantize_pt2e`, which takes those of torchao, beside torchao's own."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import qompose

from tests import products
from tests.core.toy import sqnr
from tests.interop.peers import Converted, executorch_xnnpack, torchao_x86
from tests.zoo import by_name


def by_nncf(model: str, quantizer: Any) -> Converted:
    inputs = by_name(model).inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions, of torchao's and its own deprecations
        # Here, since it takes seconds, which a process of tests that does not run these is spared.
        import nncf
        from nncf.experimental.torch.fx import quantize_pt2e

        result = quantize_pt2e(
            by_name(model).export().module(), quantizer, nncf.Dataset([inputs[0]])
        )
    return Converted(result, [result(*inputs)])


QUANTIZERS = {"xnnpack": (products.xnnpack, executorch_xnnpack), "x86": (products.x86, torchao_x86)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "quantizer"),
    [*itertools.product(("bottleneck", "mlp", "vision_transformer"), QUANTIZERS)],
)
def test_as_with_the_quantizers_of_torchao(model: str, quantizer: str) -> None:
    ours, theirs = QUANTIZERS[quantizer]
    one, other = by_nncf(model, ours(balance=False)), by_nncf(model, theirs())
    # Ours quantizes one value more, and its weights have seven bits without VNNI.
    more = (model, quantizer) == ("vision_transformer", "x86")
    assert (one.quantizes, one.dequantizes) == (other.quantizes, other.dequantizes) or more
    assert one.quantizes > 0
    reference = by_name(model).export().module()(*by_name(model).inputs())
    assert sqnr(reference, one.outputs[0]) > sqnr(reference, other.outputs[0]) - (8 if more else 1)
    assert sqnr(reference, one.outputs[0]) > 35


def test_a_composition() -> None:
    xnnpack, x86 = products.xnnpack(balance=False), products.x86(balance=False)
    alone, composed = by_nncf("mlp", xnnpack), by_nncf("mlp", qompose.compose(xnnpack, x86))
    assert (composed.quantizes, composed.dequantizes) == (alone.quantizes, alone.dequantizes)


def test_what_nncf_does_not_know_is_its_own_error() -> None:
    """Tables with float zero points, which it refuses from torchao's quantizer too."""
    with pytest.raises(Exception, match="per_channel_affine_float_qparams") as raised:
        by_nncf("embedding_mlp", qompose.compose("embedding"))
    assert type(raised.value).__module__.partition(".")[0] == "nncf"

# SPDX-License-Identifier: Apache-2.0
"""What torchao 0.18's engine and the peers' quantizers get wrong: each test states it, and that we do not.

That they are wrong is not tested: whoever mends it breaks nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.core.toy import (
    Model,
    claimed,
    convert,
    export,
    nodes_calling,
    prepare,
    randn,
    seeded,
    sqnr,
)
from tests.interop.peers import (
    QUANTIZERS,
    THEIR_WARNINGS,
    ByOperator,
    by_qompose,
    executorch_xnnpack,
    tensors_of,
    torchao_observer,
    torchao_quantizer,
    torchao_x86,
)
from tests.sampling import at_once
from tests.zoo import by_name

pytestmark = pytest.mark.filterwarnings(*THEIR_WARNINGS)

aten = torch.ops.aten

UNTOUCHED = {
    "bn_conv_two_norms": "folds both norms into one weight: outputs are off by more than they are large",
    "bn_conv_output_two_norms": "folds the convolution once and keeps one output for two norms",
    "bn_conv_with_and_without": "the reader without a norm gets the folded weight",
    "bn_conv_skip": "the skip gets the normed output",
    "bn_linear_skip": "the skip gets the normed output",
    "bn_linear_tied": "the embedding gets the folded weight",
    "densenet": "folds a convolution whose output others read",
    "retina_head": "folds one convolution into the norms of three levels",
    "transposed_conv_bn": "raises: it scales the input channels of a grouped transposed convolution",
    "transposed_1d_bn": "raises: the same in one dimension",
    "key_cache": "calibration's writes stay in the buffers of the result",
    "cond_nested": "raises in a pass over nested bodies",
    "loop_of_branches": "raises in a pass over nested bodies",
    "autocast_off": "raises in a pass over nested bodies",
    "mixed_regions": "raises in a pass over nested bodies",
    "resnet18": "folds norms that nobody asked it to fold: the last bits change",
    "bfloat16_conv_bn": "folds in bfloat16, which costs a digit",
}
"""Models that torchao's engine changes or fails on although nothing is annotated, and how."""


@pytest.mark.parametrize(
    "name", at_once(UNTOUCHED, "bn_conv_two_norms", "bn_linear_tied", "key_cache", "mixed_regions")
)
def test_a_quantizer_of_theirs_that_annotates_nothing_changes_no_bit(name: str) -> None:
    model = by_name(name)
    inputs = model.inputs()
    exported = model.export().module()
    prepared = prepare(model.export(), ByOperator({}))
    with torch.no_grad():
        observed = prepared(*inputs)
        again = qompose.convert_pt2e(prepared)(*inputs)
        expected = exported(*inputs)
    for one, other in ((expected, observed), (expected, again)):
        assert pytree.tree_structure(one) == pytree.tree_structure(other)
        for x, y in zip(tensors_of(one), tensors_of(other), strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


QUANTIZED = [
    # model, quantizer, least SQNR in dB that ours has, SQNR of torchao's engine or what it does
    ("bn_conv_two_norms", "xnnpack", 45, "-2.4 dB"),
    ("bn_conv_output_two_norms", "xnnpack", 51, "0 dB: the output is constant"),
    ("bn_conv_output_two_norms", "x86", 53, "0 dB: the output is constant"),
    ("bn_conv_with_and_without", "xnnpack", 40, "17 dB"),
    ("bn_conv_skip", "xnnpack", 35, "14 dB"),
    ("bn_linear_skip", "x86", 44, "8 dB"),
    ("bn_linear_tied", "x86", 42, "7 dB"),
    ("densenet", "xnnpack", 31, "-2.2 dB"),
    ("retina_head", "xnnpack", 38, "0 dB"),
    ("transposed_conv_bn", "xnnpack", 45, "raises"),
    ("transposed_1d_bn", "xnnpack", 41, "raises"),
    ("views", "xnnpack", 40, "2.4 dB: writes in place under another name are lost"),
    ("shifted_ids", "xnnpack", 42, "raises: int32 identifiers become float32"),
    ("attention_bucketed_bias", "xnnpack", 35, "raises: int64 buckets become float32"),
    ("key_cache", "xnnpack", 46, "-2.1 dB: calibration fills the cache"),
    ("mixed_types", "xnnpack", 38, "raises: no quantize operator for float64"),
    ("attention_additive_mask", "xnnpack", 35, "-0.2 dB: the mask is erased"),
    ("attention_finite_mask", "xnnpack", 38, "5.6 dB: the mask's scale swallows the scores"),
    ("attention_alibi", "xnnpack", 35, "12 dB"),
    ("autocast_off", "xnnpack", 42, "raises in a pass over nested bodies"),
    ("branches", "xnnpack", 42, "float: bodies of branches are not visited"),
]


AT_ONCE = (0, 5, 11, 14)


@pytest.mark.parametrize(
    ("name", "quantizer", "least"),
    at_once([row[:3] for row in QUANTIZED], *(QUANTIZED[i][:3] for i in AT_ONCE)),
)
def test_their_quantizers_give_right_results_under_our_engine(
    name: str, quantizer: str, least: float
) -> None:
    model = by_name(name)
    inputs = model.inputs()
    with torch.no_grad():
        expected = tensors_of(model.export().module()(*inputs))
    result = by_qompose(model.export(), QUANTIZERS[quantizer](), inputs)
    assert qompose.report(result.model).count("simulated (Q/DQ)") > 0
    for one, other in zip(expected, result.outputs, strict=True):
        assert one.dtype == other.dtype
        assert sqnr(one, other) > least if one.is_floating_point() else torch.equal(one, other)


def test_the_axis_counts_whatever_the_observers_name_is() -> None:
    """D2: torchao's engine drops `ch_axis` where the class has no "PerChannel" in its name."""

    class Channels(torchao_observer.PerChannelMinMaxObserver):  # type: ignore[misc]
        pass

    spec = torchao_quantizer.QuantizationSpec(
        torch.int8, Channels.with_args(eps=2**-12), -127, 127, torch.per_channel_symmetric, 1
    )
    table = {aten.conv_transpose2d.input: lambda node: ({node.args[1]: spec}, None)}
    module = seeded(nn.ConvTranspose2d(3, 4, 2))
    result = by_qompose(export(module, randn(1, 3, 5, 5)), ByOperator(table), (randn(1, 3, 5, 5),))
    (dequantize,) = result.calls("dequantize_per_channel")
    scale = getattr(result.model, str(dequantize.args[1].target))
    assert dequantize.args[3] == 1
    assert torch.equal(scale, (module.weight.abs().amax((0, 2, 3)) / 127).clamp(min=2**-12))


def pooled_branches(m: Any, x: Tensor) -> Tensor:
    """A cat, a pool and a flatten between layers: what X86InductorQuantizer propagates through."""
    both = torch.cat([m.first(x).relu(), m.second(x).relu()], 1)
    return m.head(nn.functional.max_pool2d(both, 2).flatten(1))


@pytest.mark.parametrize("first", ["xnnpack", executorch_xnnpack], ids=["ours", "executorch's"])
def test_x86_after_another_quantizer(first: Any) -> None:
    """D4: after another quantizer's annotations, X86InductorQuantizer raises on cat, pool and flatten."""
    member = first if isinstance(first, str) else first()
    inputs = (randn(2, 3, 8, 8),)
    layers = {"first": nn.Conv2d(3, 4, 3), "second": nn.Conv2d(3, 4, 3)}
    model = seeded(Model(pooled_branches, **layers, head=nn.Linear(8 * 9, 5)))
    result = by_qompose(export(model, *inputs), qompose.compose(member, torchao_x86()), inputs)
    assert sqnr(model(*inputs), result.outputs[0]) > 30


def normed_branches() -> nn.Module:
    """Convolutions with what they fuse with, in modules of their own, and a cat in each."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.cat([m.conv(x), m.relued(x).relu(), m.norm(m.normed(x))], 1)

    def branch() -> nn.Module:
        convolutions = {name: nn.Conv2d(3, 4, 3) for name in ("conv", "relued", "normed")}
        return Model(forward, **convolutions, norm=nn.BatchNorm2d(4))

    return Model(lambda m, x: m.plain(x) - m.other(x), plain=branch(), other=branch())


def own_xnnpack(path: str) -> Any:
    return XNNPACKQuantizer().set_module_name(path, get_symmetric_quantization_config(True))


def test_a_convolution_is_found_by_its_module() -> None:
    """D5: ExecuTorch's `set_module_name` annotates nothing for a convolution, fused or not."""
    program = export(normed_branches(), randn(1, 3, 8, 8))
    for path in ("plain.conv", "plain.relued", "plain.normed"):
        (nodes,) = claimed(prepare(program, own_xnnpack(path))).values()
        assert any(name.startswith("conv2d") for name in nodes)


def test_a_configuration_of_one_module_reaches_no_cat_of_another() -> None:
    """D6: ExecuTorch's filter is not asked for a cat, so every cat of a model is quantized."""
    prepared = prepare(export(normed_branches(), randn(1, 3, 8, 8)), own_xnnpack("plain"))
    cats = [nodes for rule, nodes in claimed(prepared).items() if rule.startswith("cat")]
    assert len(nodes_calling(prepared, "cat")) == 2
    assert cats == [("cat",)]


def called_twice(layer: nn.Module, chained: bool) -> nn.Module:
    """One layer, called again on its own output or on another input."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        first = m.layer(x)
        return m.layer(first).relu() if chained else first * m.layer(y).relu()

    return Model(forward, layer=layer)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "convolution": lambda: nn.Conv2d(2, 2, 3, padding=1),
}


@pytest.mark.parametrize("quantizer", ["xnnpack", "x86_inductor"])
@pytest.mark.parametrize("chained", [True, False], ids=["chained", "parallel"])
@pytest.mark.parametrize("layer", at_once(LAYERS, "convolution"))
def test_every_call_of_a_layer_is_quantized(layer: str, chained: bool, quantizer: str) -> None:
    """D7, D8: ExecuTorch skips a convolution's second call, torchao's X86 the first, or raises."""
    chosen = qompose.compose(quantizer)
    inputs = randn(2, 2, 8, 8), randn(2, 2, 8, 8, seed=1)
    model = seeded(called_twice(LAYERS[layer](), chained))
    result = convert(export(model, *inputs), chosen, *inputs)
    operators = nodes_calling(result, "linear") + nodes_calling(result, "conv2d")
    assert len(operators) == 2
    for node in operators:
        assert [str(arg.target).split(".")[1][:15] for arg in node.args[:2]] == [
            "dequantize_per_"
        ] * 2
    assert sqnr(model(*inputs), result(*inputs)) > 28

# SPDX-License-Identifier: Apache-2.0
"""The three plugins together: any order, named owners, one requantization at each border."""

from __future__ import annotations

import itertools
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.program.meta import REGION_TAG, tag, tag_of
from qompose.spec import qdq
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tests.core.toy import Model, NullQuantizer, graph_text, sqnr
from tests.sampling import at_once
from tests.zoo import ZooModel, by_name, tagged

SIMULATED = "simulated (Q/DQ)"
PRODUCTS = ("xnnpack", "x86_inductor")
SMALL = [
    *tagged("conv", without=("transformers",)),
    *tagged("attention", without=("transformers",)),
    *(
        by_name(name)
        for name in ("mlp", "mlp_3d_input", "mlp_bn", "embedding_mlp", "mixer", "scalars")
    ),
    *tagged("topology", without=("mutation", "control_flow", "conv")),
]
ENCODERS = [
    by_name(name) for name in ("bert", "distilbert", "gpt2", "vit") if find_spec("transformers")
]


EVERY = list(itertools.product([*SMALL, *ENCODERS], PRODUCTS))


IDS = torch.randint(30, (6, 5), generator=torch.Generator().manual_seed(0))


def scores(m: Any, ids: Tensor) -> Tensor:
    return m.head(m.body(m.table(ids)))


def tagger(function: Any = scores) -> nn.Module:
    """A table, a body and a head, which belong to one plugin or to several."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return Model(function, table=nn.Embedding(30, 16), body=body, head=nn.Linear(16, 4)).eval()


@cache
def program() -> torch.export.ExportedProgram:
    return torch.export.export(tagger(), (IDS,))


def stages(
    exported: Any, inputs: Any, *members: Any
) -> tuple[GraphModule, GraphModule, GraphModule]:
    """The prepared, converted and lowered model, calibrated with `inputs`."""
    prepared = qompose.prepare_pt2e(exported, qompose.compose(*members))
    with torch.no_grad():
        prepared(*inputs)
    converted = qompose.convert_pt2e(prepared)
    return prepared, converted, qompose.lower(converted)


@pytest.mark.parametrize("product", PRODUCTS)
def test_neither_the_order_nor_a_null_member_changes_anything(product: str) -> None:
    usual = stages(program(), (IDS,), "embedding", product)
    for members in (
        (product, "embedding"),
        (NullQuantizer(), "embedding", product),
        ("embedding", NullQuantizer(), product),
        ("embedding", product, NullQuantizer()),
    ):
        made = stages(program(), (IDS,), *members)
        assert [*map(graph_text, made)] == [*map(graph_text, usual)]
        assert qompose.report(made[-1]).rows == qompose.report(usual[-1]).rows


def split(first: str, second: str) -> list[qompose.Quantizer]:
    """`first` takes `body`, `second` takes `head`."""
    members = []
    for name, path in ((first, "body"), (second, "head")):
        quantizer: Any = qompose.compose(name).members[0]
        config = quantizer.backend.default_config
        members.append(quantizer.set_global(None).set_module_name(path, config))
    return members


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "reversed"])
def test_where_int8_meets_uint8_the_tensor_is_requantized_and_counted(order: int) -> None:
    members = split("xnnpack", "x86_inductor")[::order]
    _, converted, lowered = stages(program(), (IDS,), "embedding", *members)
    report = qompose.report(lowered)
    (meeting,) = report.requantizations
    assert (meeting.from_owner, meeting.to_owner) == ("xnnpack", "x86_inductor")
    assert meeting.readers == ("linear_2",)
    (node,) = (
        node
        for node in converted.graph.nodes
        if qdq.is_quantize(node) and qdq.is_dequantize(node.args[0])
    )
    assert (node.args[0].args[5], node.args[5]) == (torch.int8, torch.uint8)
    owners = {row.module.partition(".")[0]: row.owner for row in report.rows if row.macs}
    assert owners == {"body": "xnnpack", "head": "x86_inductor"}
    assert sqnr(program().module()(IDS), lowered(IDS)) > 25


def test_a_border_without_an_output_specification_needs_no_requantization() -> None:
    """The x86 rules leave outputs to their readers: the one quantize is the reader's own."""
    _, converted, lowered = stages(program(), (IDS,), *split("x86_inductor", "xnnpack"))
    assert qompose.report(lowered).requantizations == ()
    (head,) = (n for n in converted.graph.nodes if n.name == "linear_2")
    quantize = head.args[0].args[0]
    assert quantize.args[5] is torch.int8
    assert not qdq.is_dequantize(quantize.args[0])


def tensors(value: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
    ]


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # no rule of a backend's
@pytest.mark.parametrize(("model", "product"), at_once(EVERY, *EVERY[::25]), ids=str)
def test_prepared_models_are_the_exported_ones_but_for_listed_rewrites(
    model: ZooModel, product: str
) -> None:
    exported, inputs = model.export(), model.inputs()
    prepared = qompose.prepare_pt2e(exported, qompose.compose("embedding", product))
    with torch.no_grad():
        expected, actual = exported.module()(*inputs), prepared(*inputs)
    rounded = {"fold_batch_norm", "fold_weight", "product_to_linear"}  # sums in another order
    if rounded.isdisjoint(r.name for r in prepared.meta["qompose"].plan.rewrites):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(tensors(expected), tensors(actual), strict=True):
        assert one.dtype is other.dtype
        assert sqnr(one, other) > 100


QUANTIZED = [
    by_name(name)
    for name in (
        "conv_bn_relu", "lenet", "resnet18", "bottleneck", "mobilenet_v2", "unet", "densenet",
        "convnext", "mlp", "mlp_3d_input", "mlp_bn", "embedding_mlp", "mixer", "encoder_decoder",
        "vision_transformer", "attention_additive_mask", "attention_finite_mask", "conv1d",
    )
]  # fmt: skip


AT_ONCE = [
    *((by_name(name), "xnnpack") for name in ("bottleneck", "mlp_bn", "attention_finite_mask")),
    *((by_name(name), "x86_inductor") for name in ("conv_bn_relu", "densenet", "conv1d")),
]

# Untrained, its depthwise layers shrink the signal to a few steps of the classifier's input.
BOUNDS = {"mobilenet_v2": 12}


@pytest.mark.filterwarnings("ignore::qompose.QomposeWarning")  # regions that stay simulated
@pytest.mark.parametrize(
    ("model", "product"),
    at_once(itertools.product([*QUANTIZED, *ENCODERS], PRODUCTS), *AT_ONCE),
    ids=str,
)
def test_converted_and_lowered_models_are_close(model: ZooModel, product: str) -> None:
    """Converted to the float one, and what kernels compute to what is simulated."""
    exported, inputs = model.export(), model.inputs()
    _, converted, lowered = stages(exported, inputs, "embedding", product)
    with torch.no_grad():
        expected, simulated, actual = (m(*inputs) for m in (exported.module(), converted, lowered))
    assert len(converted.meta["qompose"].plan.claims) > 0
    for one, two, three in zip(*map(tensors, (expected, simulated, actual)), strict=True):
        assert one.dtype is two.dtype is three.dtype
        assert sqnr(one, two) > BOUNDS.get(model.name, 25)
        assert sqnr(two, three) > 35


class InParts(nn.Module):
    """A convolution that is quantized first and called twice, and a head that is quantized afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.body(x)))


def test_parts_that_were_quantized_before_are_left_alone(tmp_path: Path) -> None:
    """They keep their integers, are in the report, get their kernels, and are saved with the rest."""
    torch.manual_seed(0)
    net, (x, new) = InParts().eval(), torch.randn(2, 16, 3, 6, 6)
    expected = net(new)
    net.body = stages(torch.export.export(net.body, (x,)), (x,), "xnnpack")[1]
    integers = {name: b for name, b in net.body.named_buffers() if name.endswith("weight_q")}
    program = torch.export.export(net, (x,), strict=True)
    prepared, converted, lowered = stages(program, (x,), "x86_inductor", "xnnpack")
    owners = {row.name: row.owner for row in qompose.report(prepared).rows}
    assert owners == {
        "conv2d": "xnnpack", "relu": "xnnpack", "conv2d_1": "xnnpack", "relu_1": "xnnpack",
        "flatten": owners["flatten"], "linear": "x86_inductor",
        "relu_2": "x86_inductor", "linear_1": "x86_inductor",
    }  # fmt: skip
    assert {row.state for row in qompose.report(lowered).rows if row.macs} == {"int8 kernel"}
    kept = dict(converted.named_buffers())
    assert integers and all(torch.equal(kept[f"body.{n}"], b) for n, b in integers.items())
    assert sqnr(expected, lowered(new)) > 25 < sqnr(converted(new), lowered(new))
    qompose.save(converted, tmp_path / "model.pt2")
    loaded = qompose.load(tmp_path / "model.pt2")
    assert torch.equal(loaded(new), converted(new))
    assert torch.equal(qompose.lower(loaded)(new), lowered(new))
    with pytest.raises(qompose.errors.StageError, match="lowered"):
        qompose.prepare_pt2e(torch.export.export(lowered, (x,)), "xnnpack")


@pytest.mark.filterwarnings("ignore:.*_flat_weights:UserWarning")  # torch of its own module
def test_a_part_whose_operator_has_several_outputs_is_left_alone() -> None:
    """In it each output says what its operator does; in the next export they do not say it again."""

    class Recurrent(nn.Module):
        def __init__(self, rnn: nn.Module) -> None:
            super().__init__()
            self.rnn, self.last = rnn, nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Any:
            return self.last(self.rnn(x)[0])

    torch.manual_seed(0)
    net, x = Recurrent(nn.LSTM(8, 16, batch_first=True)).eval(), torch.randn(4, 5, 8)
    expected = net(x)
    net.rnn = stages(torch.export.export(net.rnn, (x,)), (x,), "x86_inductor")[1]
    once = stages(torch.export.export(net, (x,), strict=True), (x,), "xnnpack")
    again = stages(torch.export.export(once[1], (x,), strict=True), (x,), "x86_inductor")
    for _, converted, lowered in (once, again):
        kernels = [row.name for row in qompose.report(lowered).rows if row.kernel]
        assert kernels == ["lstm", "linear"]
        assert sqnr(expected, lowered(x)) > 30 < sqnr(converted(x), lowered(x))


class Pooled(nn.Module):
    """The mean of some rows of a table, and a linear behind it."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows, self.last = rows, nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Any:
        return self.last(self.rows(ids))


@pytest.mark.parametrize("known", [True, False], ids=["found", "with an operator removed"])
def test_a_claim_on_one_of_several_outputs_is_found_again(known: bool, tmp_path: Path) -> None:
    """Export lets each output of an embedding bag say what is said of the bag."""
    torch.manual_seed(0)
    net, ids = Pooled(nn.EmbeddingBag(50, 32, mode="mean")).eval(), torch.randint(50, (4, 5))
    expected = net(ids)
    net.rows = stages(torch.export.export(net.rows, (ids,)), (ids,), "embedding")[1]
    exported = torch.export.export(net, (ids,), strict=True)
    if not known:
        for node in exported.graph.nodes:
            facts = tag_of(node, REGION_TAG)
            if facts is not None:
                tag(node, **{REGION_TAG: {**facts, "items": []}})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "1 quantized region", qompose.QomposeWarning)
        _, converted, lowered = stages(exported, (ids,), ["embedding", "xnnpack"])
        qompose.save(converted, tmp_path / "net.qompose")
        loaded = qompose.load(tmp_path / "net.qompose", target="torch")
    kernels = [row.name for row in qompose.report(lowered).rows if row.kernel]
    assert kernels == (["embedding_bag"] if known else []) + ["linear"]
    assert sqnr(expected, lowered(ids)) > 30
    assert torch.equal(loaded(ids), lowered(ids))


def test_parts_of_which_no_owner_is_known_stay_as_they_are() -> None:
    """Export that is not strict drops what nodes say: operators with integer parameters are known alone."""
    torch.manual_seed(0)
    net, x = InParts().eval(), torch.randn(16, 3, 6, 6)
    expected = net(x)
    net.body = stages(torch.export.export(net.body, (x,)), (x,), "xnnpack")[1]
    with pytest.warns(qompose.QomposeWarning, match=r"(?s)conv2d .*strict=True.*conv2d_1 "):
        lowered = stages(torch.export.export(net, (x,)), (x,), "xnnpack")[2]
    states = {row.name: row.state for row in qompose.report(lowered).rows if row.macs}
    assert states == {
        "conv2d": SIMULATED, "conv2d_1": SIMULATED, "linear": "int8 kernel", "linear_1": "int8 kernel"
    }  # fmt: skip
    behind = [row for row in qompose.report(lowered).rows if row.name in ("relu", "relu_1")]
    assert [row.state for row in behind] == [SIMULATED, SIMULATED]
    assert sqnr(expected, lowered(x)) > 25

# SPDX-License-Identifier: Apache-2.0
"""The rule table on small models: what is claimed, what is refused and why, and what it becomes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.toy import Model, export, randn, sqnr
from tests.products import x86
from tests.sampling import at_once
from tests.x86_inductor.small_models import assert_lowers_right, calls, converted, reasons, rules

IMAGE, SEQUENCE, ROWS = randn(2, 4, 9, 8), randn(2, 4, 9), randn(2, 3, 8)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "relu6 in place": lambda x: F.relu6(x, inplace=True), "hardtanh clip_": lambda x: x.clip_(-0.3, 0.4),
    "hardtanh clamp": lambda x: x.clamp(max=0.4),
    "hardswish": F.hardswish, "silu": F.silu, "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"), "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
}  # fmt: skip
QUANTIZE, DEQUANTIZE = (f"quantized_decomposed.{d}quantize_per_tensor" for d in ("", "de"))


def layers(kind: str, **options: Any) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        return nn.Linear(8, 8), ROWS
    make, x = (nn.Conv2d, IMAGE) if kind == "conv2d" else (nn.Conv1d, SEQUENCE)
    return make(4, 4, **{"kernel_size": 3, **options}), x


BEHIND = [(kind, name) for kind in ("conv2d", "conv1d", "linear") for name in ACTIVATIONS]


@pytest.mark.parametrize(
    ("kind", "name"),
    at_once(
        [*BEHIND, ("linear", "tanh")],
        *(
            ("conv2d", "relu"),
            ("conv1d", "silu"),
            ("linear", "gelu tanh"),
            ("conv2d", "hardtanh clip_"),
            ("linear", "hardtanh clamp"),
        ),
    ),
)
def test_a_function_behind_a_product_is_part_of_it(kind: str, name: str) -> None:
    layer, x = layers(kind)
    act = ACTIVATIONS.get(name, torch.tanh)
    result = converted(
        Model(lambda m, x: m.second(act(m.first(x))), first=layer, second=layers(kind)[0]), x
    )
    assert f"{kind}_{name.split()[0]}" in rules(result).values()
    lowered = assert_lowers_right(result, x)
    # One quantize at the entry, and integers from one product to the next.
    assert calls(lowered).count(QUANTIZE) == 1 and DEQUANTIZE not in calls(lowered)
    moved = (f"aten.{name}" for name in ("contiguous", "squeeze", "unsqueeze"))
    assert set(calls(lowered)) <= {QUANTIZE, *moved, "qompose_x86.conv2d", "qompose_x86.linear"}


@pytest.mark.parametrize(
    ("kind", "relu", "swapped"),
    at_once(
        itertools.product(("conv2d", "conv1d", "linear"), (False, True), (False, True)),
        *(("conv2d", True, False), ("conv1d", False, True), ("linear", True, True)),
    ),
)
def test_an_input_that_is_added_stays_whole(kind: str, relu: bool, swapped: bool) -> None:
    layer, x = layers(kind, padding=1) if kind != "linear" else layers(kind)
    act = F.relu if relu else (lambda x: x)

    def function(m: Any, x: Tensor) -> Tensor:
        result = m.layer(x if kind != "linear" else x.cos())
        return act(x + result if swapped else result + x)

    result = converted(Model(function, layer=layer), x)
    assert set(rules(result).values()) == {f"{kind}_add{'_relu' * relu}"}
    assert_lowers_right(result, x)


GATES: dict[str, tuple[str, str, Callable[[Tensor], Tensor], bool]] = {
    "linears": ("linear", "linear", F.silu, False),
    "behind a view": ("linear", "linear", lambda x: F.gelu(x).flatten(0, 1).view(x.shape), False),
    "convolutions": ("conv2d", "conv2d", F.silu, True),
    "one linear": ("linear", "conv1d", lambda x: x, True),
}


@pytest.mark.parametrize("name", at_once([*GATES], "linears", "convolutions", "one linear"))
def test_a_gate_of_linears_multiplies_floats(name: str) -> None:
    """Its factors would be rounded for nothing else, three times where the next linear needs it once."""
    gate, up, act, quantized = GATES[name]
    kinds = {"gate": gate, "up": up, "down": up}
    parts = {part: layers(kind, padding=1)[0] for part, kind in kinds.items()}
    x = layers(gate)[1] if gate == up else randn(2, 4, 8)
    result = converted(Model(lambda m, x: m.down(act(m.gate(x)) * m.up(x)), **parts), x)
    assert ("mul" in rules(result).values()) == quantized
    lowered = assert_lowers_right(result, x)
    multiplied = calls(lowered).count("qompose_x86.mul")
    assert multiplied == quantized and calls(lowered).count(QUANTIZE) == 1 + (not quantized)


@pytest.mark.parametrize("swapped", [False, True], ids=["behind", "before"])
def test_a_dropout_stands_between_a_linear_and_a_sum(swapped: bool) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        result: Tensor = m.dropout(m.layer(x.cos()))
        return x + result if swapped else result + x

    model = Model(function, layer=nn.Linear(8, 8), dropout=nn.Dropout(0.5))
    result = converted(model, ROWS)
    assert set(rules(result).values()) == {"linear_add"}
    assert calls(assert_lowers_right(result, ROWS)).count("aten.dropout") == 0


def test_a_linear_of_what_is_added_to_it_leaves_that_in_float() -> None:
    result = converted(Model(lambda m, x: x + m.layer(x), layer=nn.Linear(8, 8)), ROWS)
    assert rules(result) == {"linear": "linear"}
    (add,) = [n for n in result.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert add.args[0].op == "placeholder"
    assert_lowers_right(result, ROWS)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(
    ("kind", "padding", "kernel"),
    [("conv2d", "same", 3), ("conv2d", "same", 4), ("conv1d", "same", 4), ("conv1d", "valid", 3)],
)
def test_padding_in_words(kind: str, padding: str, kernel: int) -> None:
    layer, x = layers(kind, kernel_size=kernel, padding=padding, dilation=1)
    result = converted(Model(lambda m, x: m.layer(x), layer=layer), x)
    assert set(rules(result).values()) == {kind}
    lowered = assert_lowers_right(result, x)
    uneven = padding == "same" and kernel == 4
    assert ("aten.constant_pad_nd" in calls(lowered)) == uneven


def test_a_linear_adds_a_float() -> None:
    """Eight bits for the sum of a transformer's layers would cost accuracy."""
    model = Model(
        lambda m, x: x.sin() + m.down(F.gelu(m.up(x))), up=nn.Linear(8, 16), down=nn.Linear(16, 8)
    )
    lowered = assert_lowers_right(converted(model, ROWS), ROWS)
    (call,) = [n for n in lowered.graph.nodes if "linear_add" in str(n.target)]
    assert str(call.args[6].target) == "aten.sin.default"


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "broadcast": (lambda m, x: m.layer(x) + x[:, :, :1, :1], "broadcast"),
    "scaled": (lambda m, x: torch.add(m.layer(x), x, alpha=2), "alpha=2"),
    "rank": (lambda m, x: m.layer(m.layer(x)[0]), "3 dimensions"),
    "factor": (lambda m, x: m.layer(x) * m.factor, "factor"),
    "whole mean": (lambda m, x: m.layer(x).mean((), True), "mean"),
    "dtype of a mean": (
        lambda m, x: m.layer(x).mean((2, 3), dtype=torch.float64).float(), "float64"
    ),
    "matmul": (lambda m, x: m.layer(x) @ m.layer(x), "activations"),
    "double": (lambda m, x: m.layer(m.double_layer(x.double()).float()), "input (to) is float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    function, reason = REFUSED[name]
    layer, double = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))
    model = Model(function, layer=layer, double_layer=double.double())
    model.factor = nn.Parameter(randn(4, 1, 1))
    square = IMAGE[..., :8, :8].contiguous()
    result = converted(model, square)
    assert reason in reasons(result)
    assert_lowers_right(result, square)


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "max pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max pool of a sequence": lambda x: F.max_pool1d(x.flatten(2), 3, 2, 1).unsqueeze(2),
    "average pool": lambda x: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True),
    "average pool without a stride": lambda x: F.avg_pool2d(x, 2),
    "average pool with a divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "adaptive average pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive average pool to one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "mean of channels": lambda x: x.mean(-1).unsqueeze(3),
    "views": lambda x: x.view(2, 2, 2, -1).reshape(2, 4, -1, 1).flatten(2).unsqueeze(-1),
    "permutations": lambda x: x.permute(0, 1, 3, 2).transpose(2, 3).contiguous(),
    "parts": lambda x: (
        x[:, :, 1:6, ::2][:, :, :3][:, :, 1:].select(2, 0).unsqueeze(2).squeeze(2).unsqueeze(3)
    ),
    "copies": lambda x: F.dropout(x.clone().detach(), 0.5, False).expand(2, 4, *x.shape[2:]),
    "relu": lambda x: torch.relu(x.flatten(2)).unsqueeze(3),
    "clamps": lambda x: F.relu6(F.hardtanh(x.flatten(2), -0.2, 0.3)).clamp(max=0.1).unsqueeze(3),
    "concatenation": lambda x: torch.cat([x, F.max_pool2d(x, 3, 1, 1)], 1)[:, 2:6],
    "product": lambda x: x * F.max_pool2d(x, 3, 1, 1),
    "broadcasting product": lambda x: x * x.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("restricted", at_once((False, True), False), ids=["8 bits", "7 bits"])
@pytest.mark.parametrize("name", at_once(CHAINS, *[*CHAINS][::2]))
def test_integers_go_from_one_product_to_the_next(name: str, restricted: bool) -> None:
    chain = CHAINS[name]
    model = Model(
        lambda m, x: m.second(chain(m.first(x))),
        first=nn.Conv2d(4, 4, 3, padding=1),
        second=nn.Conv2d(4, 4, 1),
    )
    lowered = assert_lowers_right(converted(model, IMAGE, reduce_range=restricted), IMAGE)
    assert calls(lowered).count(QUANTIZE) == 1 and DEQUANTIZE not in calls(lowered)


def test_attention_stays_in_float() -> None:
    """What only moves values between a product and a float operator stays in float as well."""

    def attend(m: Any, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, 3, 2, 4).transpose(1, 2) for layer in (m.q, m.k, m.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, 8)
        result: Tensor = m.out(mixed)
        return result

    names = ("q", "k", "v", "out")
    result = converted(Model(attend, **{name: nn.Linear(8, 8) for name in names}), ROWS)
    assert set(rules(result).values()) == {"linear"}
    assert DEQUANTIZE not in calls(assert_lowers_right(result, ROWS))


def test_patches_behind_a_class_token_stay_in_float() -> None:
    """A concatenation for a float reader would give the token the scale of the convolution."""

    def embed(m: Any, x: Tensor) -> Tensor:
        patches = m.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([m.token.weight.expand(2, 1, 8), patches], 1)
        result: Tensor = m.head(m.norm(tokens))
        return result

    layers = {
        "patches": nn.Conv2d(4, 8, 3, 3), "token": nn.Embedding(1, 8),
        "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3),
    }  # fmt: skip
    result = converted(Model(embed, **layers), IMAGE)
    assert set(rules(result).values()) == {"conv2d", "linear"}
    assert_lowers_right(result, IMAGE)


PARTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "one of three": (lambda x: x[:, 0], False),
    "a slice of one of three": (lambda x: x[:, :1].flatten(1), False),
    "one of two": (lambda x: x[:, 1:].select(1, 0), True),
    "two of three": (lambda x: x[:, :2].flatten(1), True),
}


@pytest.mark.parametrize("case", PARTS)
def test_what_keeps_little_of_a_product_is_quantized_behind_it(case: str) -> None:
    """It has a range of its own there, and a quiet token many steps beside loud ones."""
    part, shared = PARTS[case]
    loud = torch.zeros(3, 1) if shared else torch.tensor([[0.0], [30.0], [30.0]])
    rows, added = randn(64, 3, 8), randn(64, 3, 8, seed=1) * loud
    layers = {"body": nn.Linear(8, 8), "head": nn.Linear(part(rows)[0].numel(), 3)}
    model = Model(lambda m, x, y: m.head(part(m.body(x) + y)), **layers)
    result = converted(model, rows, added)
    assert bool({"select", "slice"} & {*rules(result).values()}) == shared
    assert_lowers_right(result, rows, added)
    with torch.no_grad():
        assert sqnr(model(rows, added), result(rows, added)) > 30


def test_one_of_an_open_number_of_tokens_is_quantized_behind() -> None:
    layers = {"body": nn.Linear(8, 8), "head": nn.Linear(8, 3)}
    model = Model(lambda m, x: m.head(m.body(x)[:, -1]), **layers)
    exported = export(model, ROWS, dynamic_shapes=({1: torch.export.Dim("tokens", max=64)},))
    prepared = qompose.prepare_pt2e(exported, x86())
    assert "select" not in rules(prepared).values() and "half of the values" in reasons(prepared)


def test_weights_of_sequences_are_stored_once() -> None:
    layer = nn.Conv1d(4, 4, 3)
    lowered = assert_lowers_right(converted(layer, SEQUENCE), SEQUENCE)
    stored = {b.untyped_storage().data_ptr() for b in lowered.buffers() if b.dtype == torch.int8}
    assert len(stored) == 1


VIEWED: dict[str, Callable[..., Tensor]] = {
    "to a linear": lambda m, x: m.head(F.relu(m.conv(x)).view(2, -1)),
    "of what is float": lambda m, x: torch.sigmoid(m.conv(x)).view(2, -1),
    "of the output": lambda m, x: m.conv(x).view(2, -1),
    "like another": lambda m, x: m.conv(x).view_as(x.flatten(1)),
    "after a copy": lambda m, x: m.conv(
        m.conv(x).view(2, 2, 2, 9, 8).transpose(1, 2).contiguous().view(2, 4, 9, 8)
    ),
}


@pytest.mark.parametrize("case", VIEWED)
def test_views_of_images_in_any_layout(case: str) -> None:
    """What oneDNN returns is laid out otherwise than the program's own images."""
    model = Model(VIEWED[case], conv=nn.Conv2d(4, 4, 3, padding=1), head=nn.Linear(288, 3))
    assert_lowers_right(converted(model, IMAGE), IMAGE)

# SPDX-License-Identifier: Apache-2.0
"""Each decomposition against torch's own operator, over its arguments; and what is refused, by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from qompose.program.control_flow import graphs_in, nodes_in
from qompose.program.decompositions import MAX_STEPS
from qompose.program.graph import copy_graph_module, module_path, refresh
from qompose.program.rewrites import apply_rewrites, find_rewrites
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.core.toy import Call, Model, randn, seeded

FULL = pytest.mark.full
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def exported(model: nn.Module, inputs: tuple[Any, ...], **options: Any) -> GraphModule:
    program = torch.export.export(model, inputs, **options)
    return copy_graph_module(program.module(check_guards=False))


def taken_apart(module: GraphModule, wanted: str) -> GraphModule:
    """The program with every call that `wanted` concerns in pieces; checks the graph."""
    candidates = find_rewrites(module, {wanted})
    assert candidates
    assert [candidate.obstacle for candidate in candidates] == [None] * len(candidates)
    sites = {node.name: module_path(node) for node in nodes_in(module)}
    pieces = apply_rewrites(module, candidates)
    module = refresh(module)
    for part in graphs_in(module):
        part.graph.lint()
    nodes = {node.name: node for node in nodes_in(module)}
    for candidate, names in zip(candidates, pieces, strict=True):
        (site,) = candidate.nodes
        assert site not in nodes
        for name in names:
            assert name.startswith(f"{site}_")
            assert "val" in nodes[name].meta
            assert module_path(nodes[name]) == sites[site]
    return module


def obstacles(module: GraphModule, wanted: str) -> list[str | None]:
    return [candidate.obstacle for candidate in find_rewrites(module, {wanted})]


def relative_error(reference: Tensor, actual: Tensor) -> float:
    scale = float(reference.detach().double().abs().max()) or 1.0
    return float((reference.detach().double() - actual.detach().double()).abs().max()) / scale


def check_equal(model: nn.Module, module: GraphModule, *inputs: Any) -> None:
    with torch.no_grad():
        references, actuals = (pytree.tree_leaves(f(*inputs)) for f in (model, module))
    for reference, actual in zip(references, actuals, strict=True):
        assert actual.dtype is reference.dtype
        assert actual.shape == reference.shape
        assert relative_error(reference, actual) <= BOUNDS[reference.dtype]


def check(wanted: str, model: nn.Module, *inputs: Any, **options: Any) -> GraphModule:
    """Take a model's operators apart and compare it with itself, strides of what it returns included."""
    module = exported(model, inputs, **options)
    strides = [v.stride() for v in _returned(module)]
    module = taken_apart(module, wanted)
    assert [v.stride() for v in _returned(module)] == strides
    check_equal(model, module, *inputs)
    return module


def _returned(module: GraphModule) -> list[Tensor]:
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    return [node.meta["val"] for node in output.all_input_nodes]


# Attention: name -> shapes of query, key and value.
SHAPES = {
    "heads": ((2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
    "cross": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    "long": ((2, 4, 7, 8), (2, 4, 3, 8), (2, 4, 3, 8)),
    "rank 3": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "rank 5": ((2, 1, 3, 5, 8), (2, 1, 3, 7, 8), (2, 1, 3, 7, 8)),
}
MASKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "no mask": lambda keep: None,
    "bool": lambda keep: keep,
    "float": lambda keep: randn(*keep.shape, seed=9),
    "infinite": lambda keep: torch.zeros(keep.shape).masked_fill(~keep, -math.inf),
    "lowest": lambda keep: torch.zeros(keep.shape).masked_fill(~keep, torch.finfo().min),
    "row": lambda keep: keep[..., 1:2, :],
    "column": lambda keep: keep[..., 1:2],
}


def tensors(shapes: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [randn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def keep_mask(queries: int, keys: int) -> Tensor:
    """A mask with one row that keeps nothing and one that keeps everything."""
    keep = randn(queries, keys, seed=7) > 0
    keep[0], keep[1, 0], keep[2] = True, True, False
    return keep


def attention(**options: Any) -> Call:
    return Call(lambda q, k, v, m=None: F.scaled_dot_product_attention(q, k, v, m, **options))


@pytest.mark.parametrize(
    ("shape", "mask", "scale"),
    [
        pytest.param(
            *row, marks=() if row[::2] == ("cross", None) or row[1:] == ("bool", 0.3) else FULL
        )
        for row in itertools.product(SHAPES, MASKS, [None, 0.3])
    ],
)
def test_attention_with_masks(shape: str, mask: str, scale: float | None) -> None:
    q, k, v = tensors(SHAPES[shape])
    given = MASKS[mask](keep_mask(q.shape[-2], k.shape[-2]))
    inputs = (q, k, v) if given is None else (q, k, v, given)
    check("split_attention", attention(scale=scale), *inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "mask", [m if m in ("bool", "infinite") else pytest.param(m, marks=FULL) for m in MASKS]
)
def test_attention_in_other_types(mask: str, dtype: torch.dtype) -> None:
    q, k, v = tensors(SHAPES["cross"], dtype)
    given = MASKS[mask](keep_mask(5, 7))
    if given is not None and given.is_floating_point():
        given = given.to(dtype) if mask != "lowest" else given.clamp(min=-1e4).to(dtype)
    check("split_attention", attention(), *((q, k, v) if given is None else (q, k, v, given)))


@pytest.mark.parametrize("shape", SHAPES)
def test_causal_attention(shape: str) -> None:
    check("split_attention", attention(is_causal=True), *tensors(SHAPES[shape]))


@pytest.mark.parametrize(("heads", "causal"), [(1, False), (2, False), (2, True), (4, True)])
def test_attention_of_grouped_heads(heads: int, causal: bool) -> None:
    shapes = ((2, 4, 5, 8), (2, heads, 7, 8), (2, heads, 7, 8))
    check("split_attention", attention(is_causal=causal, enable_gqa=True), *tensors(shapes))


def test_a_half_precision_product_does_not_overflow() -> None:
    q, k, v = (100 * x for x in tensors(SHAPES["heads"], torch.float16))
    assert check("split_attention", attention(), q, k, v)(q, k, v).isfinite().all()


def test_attention_that_keeps_nothing_is_zero_and_nothing_on_the_way_is_nan() -> None:
    q, k, v = tensors(SHAPES["cross"])
    for mask in (torch.zeros(5, 7, dtype=torch.bool), torch.full((5, 7), -math.inf)):
        module = check("split_attention", attention(), q, k, v, mask)
        seen = []

        class Watch(torch.fx.Interpreter):
            def run_node(self, n: Any, seen: list[Any] = seen) -> Any:
                seen.append(super().run_node(n))
                return seen[-1]

        assert not torch.as_tensor(Watch(module).run(q, k, v, mask)[0]).any()
        assert not any(x.isnan().any() for x in seen if isinstance(x, Tensor))


def test_views_that_were_recorded_of_the_result_still_work() -> None:
    """Torch lays the result out as the query, so this view is possible without a copy."""

    def heads(x: Tensor) -> Tensor:
        q = x.view(2, 5, 4, 8).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).view(2, 5, 32)

    check("split_attention", Call(heads), randn(2, 5, 32))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dynamic_lengths(causal: bool) -> None:
    batch, queries, keys = Dim("batch"), Dim("queries"), Dim("keys")
    q, k, v = tensors(SHAPES["cross"])
    shapes = (({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys}),)
    model = attention(is_causal=causal)
    module = check("split_attention", model, q, k, v, dynamic_shapes=shapes)
    check_equal(model, module, *tensors(((3, 4, 9, 8), (3, 4, 6, 8), (3, 4, 6, 6))))


# Recurrence: name -> (layers of it, its cell).
KINDS: dict[str, tuple[Any, Any]] = {
    "lstm": (nn.LSTM, nn.LSTMCell),
    "gru": (nn.GRU, nn.GRUCell),
    "tanh": (nn.RNN, nn.RNNCell),
    "relu": (
        lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
        lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
    ),
}


scaled = partial(seeded, size=0.4)  # weights that neither saturate nor vanish over some steps


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(torch.float32, False), (torch.float64, True), (torch.bfloat16, True)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_cells(kind: str, bias: bool, dtype: torch.dtype) -> None:
    model = scaled(KINDS[kind][1](3, 4, bias=bias)).to(dtype)
    states = [randn(2, 4, seed=i).to(dtype) for i in (1, 2)]
    check("split_cells", model, randn(2, 3).to(dtype))
    hx = tuple(states) if kind == "lstm" else states[0]
    check("split_cells", model, randn(2, 3).to(dtype), hx)


PLAIN, EVERYTHING = (1, False, False, False), (2, True, True, True)  # layers and three options


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(row, marks=() if row in (PLAIN, EVERYTHING) else FULL)
        for row in itertools.product([1, 2], *[[False, True]] * 3)
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_sequences(kind: str, options: tuple[int, bool, bool, bool]) -> None:
    layers, bidirectional, batch_first, bias = options
    model = KINDS[kind][0](
        3, 4, layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    )
    check("unroll_recurrent", scaled(model), randn(2, 6, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_sequences_with_states_and_a_dynamic_batch(kind: str) -> None:
    model = scaled(KINDS[kind][0](3, 4, batch_first=True))
    batch = Dim("batch")

    def inputs(size: int) -> Any:
        states = [randn(1, size, 4, seed=i) for i in (1, 2)]
        return randn(size, 3, 3), tuple(states) if kind == "lstm" else states[0]

    state = {1: batch}
    shapes = ({0: batch}, (state, state) if kind == "lstm" else state)
    module = check("unroll_recurrent", model, *inputs(2), dynamic_shapes=shapes)
    check_equal(model, module, *inputs(3))


def test_a_sequence_has_one_input_product_for_all_steps() -> None:
    module = check("unroll_recurrent", scaled(nn.GRU(3, 4)), randn(3, 2, 3))
    products = [n for n in module.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert [tuple(node.meta["val"].shape) for node in products[:2]] == [(3, 2, 12), (2, 12)]
    assert len(products) == 1 + 3
    longest = exported(nn.GRU(3, 4), (randn(MAX_STEPS, 2, 3),))
    assert obstacles(longest, "unroll_recurrent") == [None]


def test_states_that_nobody_reads_are_not_computed() -> None:
    outputs = Model(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(3, 4))
    module = check("unroll_recurrent", scaled(outputs), randn(2, 2, 3))
    assert all(node.users for node in module.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize(
    ("affine", "bias", "shape", "dtype"),
    [
        *((True, True, (3,), dtype) for dtype in BOUNDS),
        (True, False, (6, 3), torch.float32),
        (False, False, (3,), torch.float32),
    ],
    ids=str,
)
def test_layer_norm(affine: bool, bias: bool, shape: Any, dtype: torch.dtype) -> None:
    model = seeded(nn.LayerNorm(shape, eps=0.1, elementwise_affine=affine, bias=bias))
    check("split_layer_norm", model.to(dtype), 5 + randn(2, 6, 3).to(dtype))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_hardswish(dtype: torch.dtype) -> None:
    check("split_hardswish", nn.Hardswish(), torch.linspace(-4, 4, 33).to(dtype))


def test_hardswish_in_place_of_a_value_that_nobody_else_reads() -> None:
    model = seeded(nn.Sequential(nn.Linear(3, 3), nn.Hardswish(inplace=True)))
    check("split_hardswish", model, randn(2, 3))


def branches(self: Any, x: Tensor) -> Tensor:
    """Attention or a norm."""

    def attend(y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(y, y, y, is_causal=True)

    return torch.cond(x.sum() > 0, attend, lambda y: self.norm(y), (x,))


def test_operators_inside_bodies() -> None:
    model, x = seeded(Model(branches, norm=nn.LayerNorm(8))), randn(2, 5, 8).abs()
    whole = exported(model, (x,), dynamic_shapes=({0: Dim("batch")},))
    for wanted in ("split_attention", "split_layer_norm"):
        module = taken_apart(copy_graph_module(whole), wanted)
        for inputs in (x, -x, randn(3, 5, 8)):
            check_equal(model, module, inputs)


def stale(x: Tensor) -> Tensor:
    y = x + 1
    row = y[:1]
    return F.hardswish(y, inplace=True) + row


def attended(x: Tensor) -> Tensor:
    """As many tokens as are not zero."""
    y = x[x[:, 0].nonzero().squeeze(1)]
    return F.scaled_dot_product_attention(y, y, y)


def autocast(enabled: bool, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        return F.hardswish(x) + 1


WIDTHS, HEADS = (({2: Dim("w")},) * 2 + ({2: Dim("v")},),), (({1: Dim("h")},) * 3,)
REFUSED: dict[str, Any] = {  # the rewrite, the model, its inputs and dynamic shapes, and a word of why
    "attention with dropout": (
        "split_attention", attention(dropout_p=0.1), tensors(SHAPES["heads"]), None, "dropout"),
    "dynamic width": ("split_attention", attention(), tensors(((2, 5, 8),) * 3), WIDTHS, ""),
    "dynamic heads": (
        "split_attention", attention(enable_gqa=True), tensors(((2, 4, 5, 8),) * 3), HEADS, ""),
    "shapes of data": ("split_attention", Call(attended), [randn(5, 8)], None, ""),
    "projections": (
        "unroll_recurrent", nn.LSTM(3, 4, proj_size=2), [randn(5, 2, 3)], None, ""),
    "lstm in training": (
        "unroll_recurrent", nn.LSTM(3, 4, 2, dropout=0.5).train(), [randn(5, 2, 3)], None, "dropout"),
    "long": ("unroll_recurrent", nn.GRU(3, 4), [randn(MAX_STEPS + 1, 2, 3)], None, "65"),
    "writes to an input": (
        "split_hardswish", nn.Hardswish(inplace=True), [randn(2, 3)], None, ""),
    "read afterwards": ("split_hardswish", Call(stale), [randn(2, 3)], None, ""),
    "autocast": ("split_hardswish", Call(partial(autocast, True)), [randn(2, 3)], None, "autocast"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "model", "inputs", "shapes", "why"), REFUSED.values(), ids=REFUSED
)
def test_refused(wanted: str, model: nn.Module, inputs: Any, shapes: Any, why: str) -> None:
    module = exported(model, tuple(inputs), dynamic_shapes=shapes)
    (obstacle,) = obstacles(module, wanted)
    assert obstacle is not None and why in obstacle


def test_accepted_beside_what_is_refused() -> None:
    without = Call(partial(autocast, False))
    assert obstacles(exported(without, (randn(2, 3),)), "split_hardswish") == [None]
    trained = nn.LSTM(3, 4, 1).train()
    trained.dropout = 0.5  # between layers, of which there is one
    assert obstacles(exported(trained, (randn(5, 2, 3),)), "unroll_recurrent") == [None]


def test_a_computed_scale_is_refused() -> None:
    module = exported(attention(scale=0.5), tuple(tensors(SHAPES["heads"])))
    (site,) = (n for n in module.graph.nodes if n.op == "call_function")
    site.kwargs = {"scale": site.args[0]}
    (obstacle,) = obstacles(module, "split_attention")
    assert obstacle and "scale" in obstacle


def test_results_that_are_not_taken_apart_stay() -> None:
    module = exported(nn.LSTMCell(3, 4), (randn(2, 3),))
    (cell,) = (n for n in module.graph.nodes if n.target is torch.ops.aten.lstm_cell.default)
    with module.graph.inserting_after(cell):
        module.graph.call_function(len, (cell,))
    assert obstacles(module, "split_cells") != [None]
    module.graph.erase_node(cell.next)
    assert obstacles(module, "split_cells") == [None]
    del cell.meta["val"]
    assert obstacles(module, "split_cells") != [None]


class Experts(nn.Module):
    """Rows in groups, of which each has a matrix."""

    def __init__(self, matrices: int = 3, *, transposed: bool = False) -> None:
        super().__init__()
        size = (matrices, 16, 8) if transposed else (matrices, 8, 16)
        self.matrices, self.transposed = nn.Parameter(randn(*size).bfloat16()), transposed

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        matrices = self.matrices.transpose(1, 2) if self.transposed else self.matrices
        return F.grouped_mm(x, matrices, offs=ends)


HALF = randn(7, 8).bfloat16()
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
"""The second matrix has no rows."""


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_linears_of_their_own_rows(transposed: bool) -> None:
    module = check("split_experts", Experts(transposed=transposed), HALF, ENDS)
    products = [node for node in nodes_in(module) if node.target is torch.ops.aten.linear.default]
    assert [node.name.rpartition("_")[2] for node in products] == ["0", "1", "2"]
    assert all(node.args[1].op == "get_attr" for node in products)


def test_experts_whose_matrices_are_no_parameters_are_left() -> None:
    model = Model(lambda m, x, w, ends: F.grouped_mm(x, w, offs=ends))
    module = exported(model, (HALF, randn(3, 8, 16).bfloat16(), ENDS))
    (obstacle,) = obstacles(module, "split_experts")
    assert obstacle is not None and "parameters" in obstacle


def test_too_many_experts_are_left() -> None:
    ends = torch.arange(1, 66, dtype=torch.int32)
    (obstacle,) = obstacles(exported(Experts(65), (randn(65, 8).bfloat16(), ends)), "split_experts")
    assert obstacle is not None

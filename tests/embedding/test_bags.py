# SPDX-License-Identifier: Apache-2.0
"""Embedding bags: every mode, offsets, weights and padding, packed or plain, as torch puts them together."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose import QuantizationConfig
from qompose_embedding import EmbeddingQuantizer, get_embedding_quantization_config
from qompose_embedding.backend import EmbeddingBackend
from qompose_embedding.bag_operators import packed_bag_in_graph
from torch import Tensor, nn
from torch.nn import functional as F

from tests.core.toy import Model
from tests.sampling import at_once

ROWS = 20
aten = torch.ops.aten


def bag_model(width: int = 12, weighted: bool = False, **options: Any) -> nn.Module:
    return Model(
        lambda m, indices, offsets, weights: m.bag(indices, offsets, weights if weighted else None),
        bag=nn.EmbeddingBag(ROWS, width, **options),
    )


def converted(
    model: nn.Module, inputs: Any, config: QuantizationConfig | None = None, **options: Any
) -> Any:
    program = torch.export.export(model.eval(), inputs, **options)
    return qompose.convert_pt2e(qompose.prepare_pt2e(program, EmbeddingQuantizer(config)))


def ragged(include_last: bool = False, kind: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    """Bags of 3, 0, 1 and 5 rows; some indices occur twice, some are the padding's."""
    indices = torch.tensor([3, 0, 7, 19, 0, 0, 2, 2, 5], dtype=kind)
    offsets = torch.tensor([0, 3, 3, 4] + ([9] if include_last else []), dtype=kind)
    return indices, offsets, torch.linspace(-1.5, 2.0, 9)


def check(lowered: Any, quantized: Any, inputs: tuple[Any, ...], kernel: str) -> None:
    (row,) = (row for row in qompose.report(lowered).rows if row.owner)
    assert (row.state, row.kernel) == ("float kernel on integers", kernel)
    torch.testing.assert_close(lowered(*inputs), quantized(*inputs), rtol=1e-4, atol=1e-4)


def check_lowered(
    model: nn.Module, inputs: tuple[Any, ...], config: QuantizationConfig, kernel: str
) -> None:
    quantized = converted(model, inputs, config)
    check(qompose.lower(quantized, strict=True), quantized, inputs, kernel)


PACKED, PLAIN = "bag of packed rows", "gather rows, dequantize, bag"
FORMS = {
    "8 bits": (get_embedding_quantization_config(), PACKED),
    "4 bits": (get_embedding_quantization_config(4), PACKED),
    "2 bits, symmetric": (get_embedding_quantization_config(2, symmetric=True), PACKED),
    "groups": (get_embedding_quantization_config(4, group_size=3), PLAIN),
}


MODES = [
    *itertools.product(FORMS, ("sum", "mean", "max"), (None,), (False,), (torch.int64,)),
    *itertools.product(FORMS, ("mean",), (0, -1), (True,), (torch.int64,)),
    *itertools.product(("8 bits", "groups"), ("mean",), (0,), (False,), (torch.int32,)),
]


@pytest.mark.parametrize(
    ("form", "mode", "padding", "include_last", "kind"), at_once(MODES, *MODES[::2])
)
def test_modes(
    form: str, mode: str, padding: int | None, include_last: bool, kind: torch.dtype
) -> None:
    model = bag_model(mode=mode, padding_idx=padding, include_last_offset=include_last)
    check_lowered(model, ragged(include_last, kind), *FORMS[form])


WEIGHTS = {
    "contiguous": ragged()[2],
    "a column": torch.randn(9, 3)[:, 1],
    "one for all": torch.tensor([2.0]).expand(9),
    # Of rows that do not count.
    "infinite": torch.where(ragged()[0] == 2, float("inf"), ragged()[2]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", [None, 2], ids=str)
def test_per_sample_weights(form: str, padding: int | None) -> None:
    """In any layout."""
    config, kernel = FORMS[form]
    model = bag_model(weighted=True, mode="sum", padding_idx=padding)
    quantized = converted(model, ragged(), config)
    lowered = qompose.lower(quantized)
    for name, weights in WEIGHTS.items():
        if padding is not None or name != "infinite":
            check(lowered, quantized, (*ragged()[:2], weights), kernel)


@pytest.mark.parametrize("form", ["8 bits", "groups"])
def test_fewer_weights_than_indices_are_refused(form: str) -> None:
    size = torch.export.Dim.DYNAMIC
    indices, offsets, weights = ragged()
    model, sizes = bag_model(weighted=True, mode="sum"), ({0: size}, None, {0: size})
    lowered = qompose.lower(converted(model, ragged(), FORMS[form][0], dynamic_shapes=sizes))
    with pytest.raises(qompose.errors.InputError, match=r"indices\.shape"):
        lowered(indices, offsets, weights[:1])
    bag, rows = torch.ops.qompose_embedding.packed_bag.default, torch.zeros(ROWS, 12).byte()
    with pytest.raises(RuntimeError, match="per_sample_weights"):
        bag(rows, 8, 4, indices, offsets, 0, weights[:1], False, -1)


def branches(m: Any, ids: Tensor, which: Tensor) -> Any:
    """A bag and a lookup in both branches of a condition, and outside."""
    chosen = torch.cond(
        which,
        lambda ids: m.bag(ids) + m.words(ids).sum(1),
        lambda ids: m.bag(ids) - m.words(ids).sum(1),
        (ids,),
    )
    return chosen + m.bag(ids)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch of itself
@pytest.mark.full
@pytest.mark.parametrize("form", ["8 bits", "groups"])
def test_in_branches(form: str) -> None:
    """One table in all of them, and compiled with them."""
    ids = torch.randint(ROWS, (3, 4))
    inputs = (ids, torch.tensor(True))
    layers = {"words": nn.Embedding(ROWS, 12), "bag": nn.EmbeddingBag(ROWS, 12, mode="sum")}
    quantized = converted(Model(branches, **layers), inputs, FORMS[form][0])
    lowered = qompose.lower(quantized)
    assert qompose.report(lowered).bytes_after <= qompose.report(quantized).bytes_after
    compiled = qompose.compile_lowered(lowered, "package")
    for which in (True, False):
        inputs = (ids, torch.tensor(which))
        for run in (lowered, compiled):
            torch.testing.assert_close(run(*inputs), quantized(*inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "bits", "mode"),
    at_once(
        itertools.product((1, 5, 7), (8, 4, 2), ("mean", "max")),
        *((1, 8, "mean"), (5, 4, "max"), (7, 2, "mean"), (7, 4, "mean")),
    ),
)
def test_odd_widths(width: int, bits: int, mode: str) -> None:
    config = get_embedding_quantization_config(bits)
    check_lowered(bag_model(width, mode=mode), ragged(), config, PACKED)


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch of itself
@pytest.mark.parametrize(("mode", "decomposed"), [("sum", False), ("mean", True), ("max", False)])
def test_matrices_of_indices(mode: str, decomposed: bool) -> None:
    """The operator's name differs before and after torch's own decompositions."""
    model = nn.EmbeddingBag(ROWS, 8, mode=mode).eval()
    ids = torch.randint(ROWS, (4, 6))
    program = torch.export.export(model, (ids,))
    program = program.run_decompositions() if decomposed else program
    quantized = qompose.convert_pt2e(qompose.prepare_pt2e(program, EmbeddingQuantizer()))
    lowered = qompose.lower(quantized)
    check(lowered, quantized, (ids,), PACKED)
    assert not [n for n in lowered.graph.nodes if n.target in (aten._embedding_bag.default,)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_tables_float_type_is_kept(dtype: torch.dtype) -> None:
    model = nn.EmbeddingBag(ROWS, 8, mode="sum", dtype=dtype).eval()
    ids = torch.randint(ROWS, (4, 6))
    lowered = qompose.lower(converted(model, (ids,)))
    assert lowered(ids).dtype is dtype
    error = (lowered(ids).float() - model(ids).detach().float()).abs().max()
    assert float(error) < 0.1


@pytest.mark.parametrize("form", FORMS)
def test_an_index_out_of_range_is_an_index_error(form: str) -> None:
    model = qompose.lower(converted(bag_model(mode="sum"), ragged(), FORMS[form][0]))
    indices, *rest = ragged()
    for bad in (ROWS, -1, 10**9):
        with pytest.raises(IndexError, match=str(bad) if FORMS[form][1] == PACKED else None):
            model(torch.where(indices == 19, bad, indices), *rest)


BAD_OFFSETS = [[1, 3, 3, 4], [0, 3, 3, 10]]
"""Those that torch refuses."""
DECREASING = [[0, 5, 3, 4], [0, 30, 3, 4], [0, -5, 3, 4]]
"""Those that torch's kernels return memory for that nobody wrote, or read before the indices."""


@pytest.mark.parametrize(
    ("form", "mode"), [("8 bits", "mean"), ("4 bits", "sum"), ("groups", "max"), ("groups", "mean")]
)
def test_wrong_offsets(form: str, mode: str) -> None:
    inputs = ragged()
    lowered = qompose.lower(converted(bag_model(mode=mode), inputs, FORMS[form][0]))
    for offsets in (*BAD_OFFSETS, *DECREASING):
        with pytest.raises(RuntimeError, match="offsets"):
            lowered(inputs[0], torch.tensor(offsets), inputs[2])


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch of itself
@pytest.mark.parametrize("form", ["8 bits", "groups"])
@pytest.mark.parametrize("include_last", [False, True])
def test_compilers_look_at_offsets_that_callers_give(form: str, include_last: bool) -> None:
    inputs = ragged(include_last)
    model = bag_model(mode="sum", include_last_offset=include_last)
    lowered = qompose.lower(converted(model, inputs, FORMS[form][0]))
    for_compiler = EmbeddingBackend().for_compiler(copy.deepcopy(lowered))
    assert torch.equal(for_compiler(*inputs), lowered(*inputs))
    for offsets in (*BAD_OFFSETS, *DECREASING):
        last = [max(9, offsets[-1])] if include_last else []
        with pytest.raises(RuntimeError, match="offsets"):
            for_compiler(inputs[0], torch.tensor([*offsets, *last]), inputs[2])


@pytest.mark.filterwarnings("ignore:.*LeafSpec")  # torch of itself
@pytest.mark.parametrize("sizes", [None, {0: torch.export.Dim("batch", max=9)}], ids=str)
def test_compilers_do_not_look_at_offsets_of_a_matrix(sizes: Any) -> None:
    model, ids = nn.EmbeddingBag(ROWS, 8, mode="sum").eval(), torch.randint(ROWS, (4, 6))
    quantized = converted(model, (ids,), dynamic_shapes=(sizes,))
    for_compiler = EmbeddingBackend().for_compiler(copy.deepcopy(qompose.lower(quantized)))
    assert packed_bag_in_graph.__name__ in for_compiler.code


def test_a_program_that_reads_another_result_keeps_its_bag() -> None:
    def two_results(m: Any, indices: Tensor, offsets: Tensor) -> Any:
        found = torch.embedding_bag(m.bag.weight, indices, offsets, False, 1)
        return found[0], found[2]

    model = Model(two_results, bag=nn.EmbeddingBag(ROWS, 8)).eval()
    program = torch.export.export(model, ragged()[:2])
    with pytest.warns(qompose.QomposeWarning, match="embedding_bag"):
        qompose.prepare_pt2e(program, EmbeddingQuantizer())


@given(st.data())
def test_any_bags(data: st.DataObject) -> None:
    """The operator beside torch's own, on the values that its rows stand for."""
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    number = sum(lengths)
    ids = data.draw(st.lists(st.integers(0, ROWS - 1), min_size=number, max_size=number))
    mode, bits = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([8, 4, 2]))
    padding = data.draw(st.integers(-1, 3))
    indices = torch.tensor(ids, dtype=torch.int64)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()[:-1]])
    name = f"embedding_bag_{'byte' if bits == 8 else f'{bits}bit'}"
    pack, unpack = (getattr(torch.ops.quantized, f"{name}_{how}pack") for how in ("pre", "un"))
    table = pack(torch.randn(ROWS, 8))
    bag = torch.ops.qompose_embedding.packed_bag.default
    actual = bag(table, bits, 8, indices, offsets, mode, None, False, padding)
    expected = F.embedding_bag(
        indices,
        unpack(table),
        offsets,
        mode=("sum", "mean", "max")[mode],
        padding_idx=padding if padding >= 0 else None,
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "mode", "how"),
    at_once(
        [
            (form, mode, how)
            for form, mode in zip(FORMS, ("sum", "mean", "max", "mean"), strict=True)
            for how in ("default", "package")
        ],
        ("8 bits", "sum", "default"),
    ),
)
def test_compiled_and_packaged(form: str, mode: str, how: str) -> None:
    inputs = ragged()
    lowered = qompose.lower(converted(bag_model(mode=mode, padding_idx=0), inputs, FORMS[form][0]))
    expected = lowered(*inputs)
    compiled = qompose.compile_lowered(lowered, how)
    torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError):
        compiled(torch.full_like(inputs[0], ROWS), *inputs[1:])
    with pytest.raises(RuntimeError):
        compiled(inputs[0], torch.tensor(DECREASING[0]), inputs[2])

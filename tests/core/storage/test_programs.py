# SPDX-License-Identifier: Apache-2.0
"""Arguments, results and every kind of plain tensor survive a file, in as few bytes as they need."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose.program.call_signature import call_signature
from qompose.program.graph import get_attribute
from qompose.storage.artifact_file import pack, pack_bits, unpack, unpack_bits
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.storage.test_artefact import (
    X,
    assert_same_model,
    layers,
    mlp,
    net,
    stored,
    unquantized,
)
from tests.core.toy import LINEAR, Call, Model, NullQuantizer, prepare, randn, seeded, toy
from tests.zoo import by_name

Pair = namedtuple("Pair", "low high")


def nested(m: Any, a: Any, pair: Any, *rest: Tensor, flag: bool, **named: Any) -> Any:
    total = a["x"] + a["y"][0] + pair[0] * pair[1] + sum(rest)
    return {"sum": total, "more": [named["z"] + 1, None, 3, "text", (total - 1,)]}


def count(m: Any, x: Tensor) -> Any:
    """Sizes that only the data tell."""
    rows = x.nonzero()
    length = x.sum().item()
    torch._check(length >= 0)
    return (rows + 1).flatten(), torch.zeros(length), rows.shape[0] * 2


def odd(m: Any, input: Tensor, *, sum: Tensor, **inputs: Tensor) -> Tensor:
    """Names that Python has too, and such as it cannot have."""
    return m.parts["a-b"](input + sum) + m.parts["1 {x}"](inputs["y"])


ODD_PARTS = nn.ModuleDict({"a-b": nn.Linear(8, 4), "1 {x}": nn.Linear(8, 4)})
PROGRAMS = {
    "nested": (
        Model(nested),
        ({"x": randn(3), "y": [randn(3)]}, (randn(3), 2.0), randn(3), randn(3)),
        {"flag": True, "z": randn(2)},
    ),
    "count": (Model(count), (torch.tensor([0, 1, 2]),), {}),
    "odd": (seeded(Model(odd, parts=ODD_PARTS)), (), {"input": X, "sum": X, "y": X}),
}  # fmt: skip


class TestCalls:
    """Arguments, their names and sizes, and results."""

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_they_come_back(self, name: str, path: Path) -> None:
        module, args, kwargs = PROGRAMS[name]
        program = torch.export.export(module, args, kwargs)
        saved = qompose.convert_pt2e(prepare(program, NullQuantizer()))
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        other = pytree.tree_map_only(Tensor, lambda tensor: tensor + 1, (args, kwargs))
        for inputs, named in ((args, kwargs), other):
            assert_same_outputs(saved(*inputs, **named), loaded(*inputs, **named))

    def test_dynamic_sizes_need_no_help(self, path: Path) -> None:
        batch = Dim("batch", min=2, max=64)
        shapes = {"x": {0: batch}, "shift": {0: 2 * batch}}

        def double(m: Any, x: Tensor, *, shift: Tensor) -> Tensor:
            return torch.cat([layers(m, x)] * 2) + shift

        given = {"shift": randn(12, 4)}
        program = torch.export.export(net(double), (X,), given, dynamic_shapes=shapes)
        prepared = prepare(program, toy(LINEAR))
        prepared(X, **given)
        saved = qompose.convert_pt2e(prepared)
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        for size in (2, 3, 64):
            x, shift = randn(size, 8), randn(2 * size, 4)
            assert torch.equal(loaded(x, shift=shift), saved(x, shift=shift))
        signature = call_signature(loaded)
        again = torch.export.export(
            loaded, signature.args, dict(signature.kwargs), dynamic_shapes=signature.dynamic_shapes
        )
        found = sorted((int(r.lower), int(r.upper)) for r in again.range_constraints.values())
        assert found == [(2, 64), (4, 128)]
        assert again.module()(randn(64, 8), shift=randn(128, 4)).shape == (128, 4)

    def test_a_name_with_quotes_is_refused(self, path: Path) -> None:
        quoted = Model(lambda self, x: getattr(self, "it's")(x), **{"it's": nn.Linear(8, 8)})
        with pytest.raises(qompose.UserError, match="it's"):
            qompose.save(unquantized(quoted, X), path)

    def test_types_without_a_name_are_refused(self, path: Path) -> None:
        with pytest.raises(qompose.UserError, match="Pair"):
            qompose.save(unquantized(Call(lambda x: Pair(x, x + 1)), X), path)
        with pytest.raises(qompose.UserError, match="round trip"):
            qompose.save(unquantized(Call(lambda x: {(1, 2): x + 1}), X), path)

    @pytest.mark.parametrize("value", [object(), randn(2).to_sparse()], ids=["object", "sparse"])
    def test_examples_that_are_no_plain_tensors_are_refused(self, value: Any, path: Path) -> None:
        saved = unquantized(net(), X)
        next(iter(saved.graph.nodes)).meta["val"] = value
        with pytest.raises(qompose.UserError, match="example"):
            qompose.save(saved, path)

    def test_a_graph_that_is_called_in_a_way_of_its_own_is_refused(self, path: Path) -> None:
        saved = unquantized(net(), X)
        saved.graph.set_codegen(type("Own", (CodeGen,), {})())
        with pytest.raises(qompose.UserError, match="Own"):
            qompose.save(saved, path)

    def test_dataclasses_and_named_tuples(self, path: Path) -> None:
        @dataclass
        class Batch:
            x: Tensor
            weight: Tensor | None

        Ends = namedtuple("Ends", "first last")
        torch.export.register_dataclass(Batch, serialized_type_name="tests.Batch")
        pytree._register_namedtuple(Ends, serialized_type_name="tests.Ends")

        def typed(m: Any, batch: Any, **named: Any) -> Any:
            return Ends(batch.x + named["bias"]["b"], Batch(batch.x * 2, None))

        batch, bias = Batch(X, None), OrderedDict(b=randn(8))
        program = torch.export.export(Model(typed), (batch,), {"bias": bias})
        loaded = stored(qompose.convert_pt2e(prepare(program, NullQuantizer())), path)
        result = loaded(batch, bias=bias)
        assert torch.equal(result.first, X + bias["b"])
        assert isinstance(result.last, Batch) and torch.equal(result.last.x, X * 2)

    def test_registered_types_are_looked_up(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Box:
            def __init__(self, value: Tensor, label: str) -> None:
                self.value, self.label = value, label

        pytree.register_pytree_node(
            Box,
            lambda box: ([box.value], box.label),
            lambda values, label: Box(*values, label),
            serialized_type_name="tests.Box",
        )

        result = stored(unquantized(Call(lambda x: Box(x + 1, "sum")), X), path)(X)
        assert result.label == "sum" and torch.equal(result.value, X + 1)
        monkeypatch.delitem(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, "tests.Box")
        pytree.treespec_loads.cache_clear()  # another process has not read the tree before
        with pytest.raises(qompose.UserError, match=r"tests\.Box"):
            qompose.load(path)


PLAIN = {
    "transposed": randn(4, 6).t(),
    "strided": randn(6, 4)[::2, 1:3],
    "expanded": randn(4, 1).expand(4, 5),
    "channels": randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "empty_and_transposed": torch.empty(3, 0).t(),
    "special": torch.tensor([1.5, float("nan"), -0.0, float("inf")]),
    "complex": randn(5) + 1j * randn(5, seed=1),
    **{
        f"of_{dtype}".replace(".", "_"): (randn(3, 4) * 9).to(dtype)
        for dtype in (
            *(torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.float8_e4m3fn),
            *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16),
        )
    },
}


class TestTensors:
    """What shares memory is stored once; every kind of plain tensor survives."""

    def test_tied_tables_and_zero_points(self, path: Path) -> None:
        layers = {"table": nn.Embedding(1000, 64), "head": nn.Linear(64, 1000, bias=False)}
        weight = layers["head"].weight = layers["table"].weight
        row, ids = nn.Buffer(weight.detach()[3]), torch.tensor([[1, 2, 3]])
        tied = Model(lambda m, ids: m.head(m.table(ids) + m.row), **layers, row=row)
        saved = unquantized(seeded(tied), ids)
        loaded = stored(saved, path)
        assert_same_outputs(saved(ids), loaded(ids))
        assert path.stat().st_size < 1000 * 64 * 4 * 1.2
        paths = [str(n.target) for n in loaded.graph.nodes if n.op == "get_attr"]
        tensors = [get_attribute(loaded, p) for p in paths]
        assert len({t.untyped_storage().data_ptr() for t in tensors}) == 1
        before = {p: get_attribute(saved, p) for p in paths}
        assert len({id(t) for t in tensors}) == len({id(t) for t in before.values()})
        assert {p: t.storage_offset() for p, t in zip(paths, tensors, strict=True)} == {
            p: t.storage_offset() for p, t in before.items()
        }

    @pytest.mark.parametrize("kind", ["buffer", "not persistent", "attribute"])
    def test_buffers(self, kind: str, path: Path) -> None:
        def forward(m: Any, x: Tensor) -> Any:
            return x + 1, [getattr(m, name).clone() for name in PLAIN]

        holder = Model(forward, **(PLAIN if kind == "attribute" else {}))
        for name, tensor in PLAIN.items() if kind != "attribute" else ():
            holder.register_buffer(name, tensor, persistent=kind == "buffer")
        saved = unquantized(holder, X)
        loaded = stored(saved, path)
        targets = {str(n.target) for n in saved.graph.nodes if n.op == "get_attr"}
        assert len(targets) == len(PLAIN)
        for target in targets:
            before, after = (get_attribute(model, target) for model in (saved, loaded))
            assert (before.dtype, before.shape) == (after.dtype, after.shape), target
            assert before.stride() == after.stride(), target
            if before.dtype.itemsize == 1:
                before, after = before.view(torch.uint8), after.view(torch.uint8)
            assert_same_outputs(before, after)

    def test_views_of_other_types_share_their_memory_again(self, path: Path) -> None:
        memory = torch.arange(40, dtype=torch.uint8)
        views = {"bytes": memory[3:20], "words": memory[8:32].view(torch.int32)}
        buffers = {name: nn.Buffer(view) for name, view in views.items()}
        model = Model(lambda m, x: x + m.bytes.sum() + m.words.sum(), **buffers)
        saved = unquantized(model, X)
        loaded = stored(saved, path)
        assert torch.equal(loaded(X), saved(X))
        loaded.get_buffer("bytes").fill_(0)
        assert loaded.get_buffer("words")[:3].tolist() == [0, 0, 0]

    def test_one_tensor_of_two_names_stays_one(self) -> None:
        weight = nn.Parameter(randn(3, 4))
        plain, frozen = randn(2).requires_grad_(), nn.Parameter(randn(2), requires_grad=False)
        tensors = {"a": weight, "b": weight, "c": weight.detach()}
        views, blocks = pack({**tensors, "d": plain, "e": frozen})
        found = dict(unpack(views, blocks))
        assert len(blocks) == 3
        assert found["a"] is found["b"] is not found["c"]
        assert {name for name, tensor in found.items() if tensor.requires_grad} == {*"abd"}
        assert isinstance(found["a"], nn.Parameter) and not isinstance(found["c"], nn.Parameter)
        assert found["c"].data_ptr() == found["a"].data_ptr()

    def test_of_a_large_storage_only_what_is_used_is_kept(self) -> None:
        large = randn(1000, 8)
        views, blocks = pack({"a": large[500:502], "b": large[501:504, ::2]})
        (block,) = blocks.values()
        assert block.numel() * block.element_size() < 4 * 8 * 4 + 16
        found = dict(unpack(views, blocks))
        assert torch.equal(found["a"], large[500:502])
        assert torch.equal(found["b"], large[501:504, ::2])
        found["b"].zero_()
        assert found["a"][1, 0] == 0, "they still overlap"
        (block,) = pack({"expanded": randn(4, 1).expand(4, 1000)})[1].values()
        assert block.nbytes < 100, "it is stored as it is"

    def test_memory_is_aligned_and_belongs_to_the_model_alone(self, path: Path) -> None:
        loaded = stored(mlp(), path)
        path.write_bytes(b"")
        assert all(b.data_ptr() % 64 == 0 for b in loaded.buffers())
        assert torch.isfinite(loaded(X)).all()

    def test_a_cache_starts_from_its_exported_state(self, path: Path) -> None:
        model = by_name("key_cache")
        saved = qompose.convert_pt2e(prepare(model.export(), NullQuantizer()))
        inputs = model.inputs()
        with torch.no_grad():
            first, second = copy.deepcopy((saved(*inputs), saved(*inputs)))
            loaded = stored(saved, path)  # after it ran
            assert_same_outputs(first, copy.deepcopy(loaded(*inputs)))
            assert_same_outputs(second, loaded(*inputs))
        state = loaded.meta["qompose"].state
        assert state and set(state) == set(saved.meta["qompose"].state)
        assert all(not torch.equal(v, get_attribute(loaded, p)) for p, v in state.items())

    @pytest.mark.parametrize(
        "value",
        [
            randn(8, 16).to_sparse(),
            torch._neg_view(randn(8, 16)),
            randn(8, 16).as_subclass(type("Own", (Tensor,), {})),
        ],
    )
    def test_what_is_no_plain_memory_is_refused_by_name(self, value: Tensor, path: Path) -> None:
        saved = unquantized(net(), X)
        saved.first.weight = nn.Parameter(value)  # type: ignore[union-attr]
        with pytest.raises(qompose.UserError, match=r"first\.weight"):
            qompose.save(saved, path)
        assert not path.exists()


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """With both bounds among them."""
    block = torch.randint(low, high + 1, shape, dtype=dtype)
    block.view(-1)[:2] = torch.tensor([low, high], dtype=dtype)
    return block


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (integers(-8, 7, 32, 64), 1 / 2), (integers(-2, 1, 32, 64), 1 / 4), (integers(127, 127, 1024), 1 / 8),
        (integers(-4, 3, 41, 41), 3 / 8), (integers(0, 1, 1025, dtype=torch.uint8), 1 / 8),
        (integers(-16, 15, 1027), 5 / 8), (integers(-8, 8, 32, 64), 5 / 8),
        (integers(-63, 63, 32, 64), 7 / 8),
        (integers(0, 15, 41, 41, dtype=torch.uint8), 1 / 2),
        (integers(240, 255, 1027, dtype=torch.uint8), 1 / 2), (integers(-128, -125, 1025), 1 / 4),
        (integers(112, 127, 16, 8, 9), 1 / 2),
        (integers(-64, 64, 32, 64), 1),  # a value too many
        (integers(-127, 127, 32, 64), 1),
        (integers(-8, 7, 1023), 1),  # not worth it
        (integers(-8, 7, 32, 64, dtype=torch.int32), 1 / 8),
        (integers(2**62, 2**62 + 3, 1024, dtype=torch.int64), 1 / 32),
        (integers(-(2**15), 15 - 2**15, 1024, dtype=torch.int16), 1 / 4),
        (torch.tensor([-(2**63), 2**63 - 1]).repeat(600), 1), (torch.zeros(2000, dtype=torch.bool), 1),
        (torch.zeros(2000), 1),
    ],
)  # fmt: skip
def test_what_fits_is_packed(block: Tensor, part: float) -> None:
    packed, stored = pack_bits({"block": block})
    assert stored["block"].nbytes == -(-block.nbytes * part // 1)
    assert (stored["block"] is block) == (not packed)
    back = unpack_bits(packed, stored)["block"]
    assert back.dtype is block.dtype and torch.equal(back, block)


@given(
    low=st.integers(-128, 127),
    span=st.integers(0, 127),
    size=st.integers(1024, 1040),
    seed=st.integers(0, 99),
)
def test_every_range(low: int, span: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    block = integers(low, min(low + span, 127), size)
    packed, stored = pack_bits({"block": block})
    assert packed and torch.equal(unpack_bits(packed, stored)["block"], block)


@pytest.mark.parametrize(
    "forged",
    [
        {"bits": 3}, {"bits": True}, {"bits": 1}, {"low": 1e3}, {"low": 4000}, {"dtype": "float32"},
        {"shape": [2048, 2]}, {"shape": [32, 32]}, {"shape": [-1]}, {"shape": [2**40, 2**40]},
        {"shape": "32"},
    ],
)  # fmt: skip
def test_what_is_no_packing(forged: dict[str, Any]) -> None:
    packed, stored = pack_bits({"block": integers(-8, 7, 32, 64)})
    with pytest.raises((ValueError, TypeError, LookupError, RuntimeError)):
        unpack_bits({"block": {**packed["block"], **forged}}, stored)
    with pytest.raises(LookupError):
        unpack_bits({"other": packed["block"]}, stored)


def test_a_model_of_four_bits_takes_half_the_file(tmp_path: Path) -> None:
    sizes = []
    for number, low in enumerate((-127, -8)):
        model, path = mlp(), tmp_path / f"{number}.qompose"
        model.register_buffer("table", integers(low, -low - 1, 256, 256))
        with model.graph.inserting_before(model.graph.output_node()):
            model.graph.get_attr("table")
        qompose.save(model, path)
        again = qompose.load(path)
        assert torch.equal(again.get_buffer("table"), model.get_buffer("table"))
        assert torch.equal(again(X), model(X))
        sizes.append(path.stat().st_size)
    assert sizes[0] - sizes[1] == pytest.approx(256 * 256 / 2, abs=200)

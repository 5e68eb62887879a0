# SPDX-License-Identifier: Apache-2.0
"""What shares memory is stored once and shares it again; every kind of plain tensor survives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.program.graph import get_attribute
from qompose.storage.artifact_file import pack, unpack
from torch import Tensor, nn

from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.storage.test_artefact import MLP, X, mlp, stored, unquantized
from tests.core.toy import NullQuantizer, prepare, randn, seeded
from tests.zoo import by_name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.qompose"


class TestTensors:
    """What shares memory is stored once; every kind of plain tensor survives."""

    def test_tied_tables_and_zero_points(self, path: Path) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(1000, 64)
                self.head = nn.Linear(64, 1000, bias=False)
                self.head.weight = self.table.weight
                self.register_buffer("row", self.table.weight.detach()[3])

            def forward(self, ids: Tensor) -> Tensor:
                return self.head(self.table(ids) + self.row)

        ids = torch.tensor([[1, 2, 3]])
        saved = unquantized(seeded(Tied()), ids)
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

    @pytest.mark.parametrize(
        "tensor",
        [
            pytest.param(randn(4, 6).t(), id="transposed"),
            pytest.param(randn(6, 4)[::2, 1:3], id="strided"),
            pytest.param(randn(4, 1).expand(4, 5), id="expanded"),
            pytest.param(randn(2, 3, 4, 5).to(memory_format=torch.channels_last), id="channels"),
            pytest.param(torch.tensor(2.5), id="0-d"),
            pytest.param(torch.empty(0, 3), id="empty"),
            pytest.param(torch.empty(3, 0).t(), id="empty and transposed"),
            pytest.param(torch.tensor([1.5, float("nan"), -0.0, float("inf")]), id="special"),
            pytest.param(randn(5) + 1j * randn(5, seed=1), id="complex"),
            *(
                pytest.param((randn(3, 4) * 9).to(dtype), id=str(dtype))
                for dtype in (
                    *(torch.bfloat16, torch.float16, torch.float64, torch.bool),
                    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16),
                    torch.float8_e4m3fn,
                )
            ),
        ],
    )
    @pytest.mark.parametrize("kind", ["buffer", "not persistent", "attribute"])
    def test_buffers(self, tensor: Tensor, kind: str, path: Path) -> None:
        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                if kind == "attribute":
                    self.held = tensor
                else:
                    self.register_buffer("held", tensor, persistent=kind == "buffer")

            def forward(self, x: Tensor) -> Any:
                return x + 1, self.held.clone()

        saved = unquantized(Holder(), X)
        loaded = stored(saved, path)
        (target,) = {str(n.target) for n in saved.graph.nodes if n.op == "get_attr"}
        before, after = get_attribute(saved, target), get_attribute(loaded, target)
        assert (before.dtype, before.shape, before.stride()) == (
            after.dtype,
            after.shape,
            after.stride(),
        )
        assert_same_outputs(before.view(torch.uint8) if before.dtype.itemsize == 1 else before,
                            after.view(torch.uint8) if after.dtype.itemsize == 1 else after)  # fmt: skip
        assert path.stat().st_size < 8000, "an expanded tensor is stored as it is"

    def test_views_of_other_types_share_their_memory_again(self, path: Path) -> None:
        class Views(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                memory = torch.arange(40, dtype=torch.uint8)
                self.register_buffer("bytes", memory[3:20])
                self.register_buffer("words", memory[8:32].view(torch.int32))

            def forward(self, x: Tensor) -> Any:
                return x + self.bytes.sum() + self.words.sum()

        saved = unquantized(Views(), X)
        loaded = stored(saved, path)
        assert torch.equal(loaded(X), saved(X))
        loaded.get_buffer("bytes").fill_(0)
        assert loaded.get_buffer("words")[:3].tolist() == [0, 0, 0]

    def test_one_tensor_of_two_names_stays_one(self) -> None:
        weight = nn.Parameter(randn(3, 4))
        views, blocks = pack({"a": weight, "b": weight, "c": weight.detach()})
        found = dict(unpack(views, blocks))
        assert len(blocks) == 1
        assert found["a"] is found["b"] is not found["c"]
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

    def test_what_is_no_plain_memory_is_refused_by_name(self, path: Path) -> None:
        saved = unquantized(seeded(MLP()), X)
        saved.first.weight = nn.Parameter(randn(8, 16).to_sparse())  # type: ignore[union-attr]
        with pytest.raises(qompose.UserError, match=r"first\.weight.*without plain memory"):
            qompose.save(saved, path)
        assert not path.exists()

# SPDX-License-Identifier: Apache-2.0
"""A program: what it takes and refuses, what it returns, and that it outlives copies, files and threads."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose.backend import CallArgument, CallInterface
from qompose_xnnpack import ExecutorchProgram
from qompose_xnnpack.executorch_target.errors import ExecutorchInputError, ExecutorchTargetError
from qompose_xnnpack.executorch_target.lowering import lower_to_executorch
from qompose_xnnpack.executorch_target.method_interface import Interface
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from tests.core.toy import Model, randn
from tests.processes import python
from tests.xnnpack.executorch_target.runtime import converted

pytest.importorskip("executorch")


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Any, expected: Any, step: float = 0.1) -> None:
    """Assert equal structures, and tensors that differ by a few quantization steps at most."""
    one, first = pytree.tree_flatten(actual)
    other, second = pytree.tree_flatten(expected)
    assert first == second
    for x, y in zip(one, other, strict=True):
        if isinstance(y, Tensor):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert (x - y).abs().max().item() <= step
        else:
            assert x == y


def odd_one(
    m: Any, x: Tensor, times: int, flag: bool, mask: Tensor | None = None, *, extra: Any
) -> Any:
    """Takes what is no tensor, and returns an input, a constant, None and a number."""
    y = m.linear(x) * times if flag else x
    return {"y": y, "same": x, "constant": m.constant, "none": mask, "pair": (y + 1, 7)}


ODD_ARGS, ODD_KWARGS = (randn(2, 8), 3, True, None), {"extra": {"a": randn(1), "b": 1.5}}


@pytest.fixture(scope="module")
def odd() -> tuple[ExecutorchProgram, Any]:
    torch.manual_seed(0)
    model = Model(odd_one, linear=nn.Linear(8, 8), constant=nn.Buffer(torch.arange(3.0)))
    graph = converted(model, ODD_ARGS, kwargs=ODD_KWARGS)
    return qompose.lower(graph, "executorch"), graph


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "type": ((randn(2, 8).double(), 3, True, None), "'x'"),
    "size": ((randn(3, 8), 3, True, None), "'x'"),
    "rank": ((randn(8), 3, True, None), "'x'"),
    "no tensor": ((5, 3, True, None), "'x'"),
    "layout": ((randn(2, 8).to_sparse(), 3, True, None), "'x'"),
    "device": ((randn(2, 8).to("meta"), 3, True, None), "'x'"),
    "number": ((randn(2, 8), 4, True, None), "'times'"),
    "number for a truth": ((randn(2, 8), 3, 1, None), "'flag'"),
    "tensor for None": ((randn(2, 8), 3, True, randn(2)), "'mask'"),
    "missing": ((randn(2, 8), 3), "x, times, flag, mask"),
}


class TestOneOfAKind:
    def test_results_have_the_structure_of_the_model(self, odd: Any) -> None:
        program, graph = odd
        args = (randn(2, 8, seed=1), *ODD_ARGS[1:])
        close(program.run(*args, **ODD_KWARGS), graph(*args, **ODD_KWARGS))
        assert torch.equal(program.run(*args, **ODD_KWARGS)["same"], args[0])

    @pytest.mark.parametrize("name", WRONG)
    def test_wrong_inputs_are_named(self, odd: Any, name: str) -> None:
        args, argument = WRONG[name]
        with pytest.raises(ExecutorchInputError, match=argument):
            odd[0].run(*args, **ODD_KWARGS)
        close(odd[0].run(*ODD_ARGS, **ODD_KWARGS), odd[1](*ODD_ARGS, **ODD_KWARGS))

    def test_inputs_that_need_gradients_or_are_views(self, odd: Any) -> None:
        x = randn(8, 2).t().requires_grad_()
        expected = odd[0].run(x.detach().contiguous(), *ODD_ARGS[1:], **ODD_KWARGS)["y"]
        actual = odd[0].run(x, *ODD_ARGS[1:], **ODD_KWARGS)["y"]
        assert torch.equal(actual, expected) and not actual.requires_grad


def test_inputs_of_an_unknown_structure_are_counted() -> None:
    interface = Interface(call=CallInterface((CallArgument(name="x"),)))
    assert interface.flat((None,), {}, "forward") == [None]
    with pytest.raises(ExecutorchInputError, match="2"):
        interface.flat((None, None), {}, "forward")


@pytest.mark.parametrize(("how", "shapes"), [("twice", None), (5, ({}, Dim.DYNAMIC))])
def test_inputs_that_the_runtime_cannot_take_are_refused_at_once(how: Any, shapes: Any) -> None:
    scaled = Model(lambda m, x, how: x * (2 if isinstance(how, str) else how))
    exported = torch.export.export(scaled, (randn(2, 8), how), dynamic_shapes=shapes)
    with pytest.raises(ExecutorchInputError, match="'how'"):
        lower_to_executorch(
            exported.module(), (randn(2, 8), how), dynamic_shapes=shapes, load=False
        )


def two_results(m: Any, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.linear(m.table(tokens) + x)
    return y, y.softmax(-1)


@pytest.fixture(scope="module")
def sentences() -> tuple[ExecutorchProgram, Any]:
    torch.manual_seed(0)
    batch, length = Dim("batch", max=8), Dim("length", min=3, max=32)
    shapes = ({0: batch, 1: length}, {0: batch, 1: length})
    model = Model(two_results, table=nn.Embedding(50, 16), linear=nn.Linear(16, 4))
    both = qompose.compose("embedding", "xnnpack")
    graph = converted(model, (words(2, 5), randn(2, 5, 16)), quantizer=both, sizes=shapes)
    return qompose.lower(graph, "executorch"), graph


class TestDynamic:
    @settings(max_examples=12)
    @given(batch=st.integers(1, 8), length=st.integers(3, 32), seed=st.integers(0, 99))
    def test_any_size_within_the_bounds(
        self, sentences: Any, batch: int, length: int, seed: int
    ) -> None:
        program, graph = sentences
        args = (words(batch, length, seed=seed), randn(batch, length, 16, seed=seed))
        close(program.run(*args), graph(*args))

    @pytest.mark.parametrize(
        ("tokens", "x", "name"),
        [((9, 5), (9, 5), "tokens"), ((2, 33), (2, 33), "tokens"), ((2, 2), (2, 2), "tokens"),
         ((2, 5), (2, 6), "x")],
    )  # fmt: skip
    def test_any_other_is_refused(
        self, sentences: Any, tokens: tuple[int, int], x: tuple[int, int], name: str
    ) -> None:
        with pytest.raises(ExecutorchInputError, match=f"'{name}'"):
            sentences[0].run(words(*tokens), randn(*x, 16))

    def test_a_table_of_another_plugin_stands_beside(self, sentences: Any) -> None:
        program, _ = sentences
        *check, lookup = program.delegation.portable
        assert lookup.name == "quantized_decomposed.embedding_byte.default" and lookup.int8
        # What looks whether the indices are in the table.
        assert [o.name for o in check] == [
            "aten.embedding.default", "aten.sum.dim_IntList", "aten.add.Tensor"
        ]  # fmt: skip
        assert program.delegation.whole
        rows = {row.operator: row for row in qompose.report(program).rows}
        assert rows["aten.embedding"].state == "float kernel on integers"
        assert rows["aten.linear"].state == "int8 kernel"


@pytest.mark.full
def test_the_mean_of_growing_batches_runs_and_the_report_warns_other_runtimes() -> None:
    means = Model(lambda m, x: m.conv(x).relu().mean([2, 3], True), conv=nn.Conv2d(3, 4, 3))
    graph = converted(means, randn(2, 3, 9, 9), sizes=({0: Dim("batch", max=64)},))
    program = qompose.lower(graph, "executorch")
    (note,) = (n for n in qompose.report(program).notes if "(64, 3, 9, 9)" in n)
    assert "'forward'" in note
    for batch in (1, 64, 3):
        x = randn(batch, 3, 9, 9, seed=batch)
        close(pickle.loads(pickle.dumps(program)).run(x), graph(x))
        close(program.run(x), graph(x))
    fixed = qompose.lower(converted(means, randn(2, 3, 9, 9)), "executorch")
    assert not any("'forward'" in note for note in qompose.report(fixed).notes)


class TestLife:
    def test_two_programs_at_once_and_after_their_makers(self, odd: Any, sentences: Any) -> None:
        fresh = pickle.loads(pickle.dumps(odd[0]))
        run, expected = fresh.run, odd[1](*ODD_ARGS, **ODD_KWARGS)
        output = run(*ODD_ARGS, **ODD_KWARGS)
        del fresh
        gc.collect()
        close(output, expected)
        args = (words(2, 5), randn(2, 5, 16))
        for _ in range(3):
            close(run(*ODD_ARGS, **ODD_KWARGS), expected)
            close(sentences[0].run(*args), sentences[1](*args))

    def test_a_method_that_fails_at_its_largest_is_loaded_again(
        self, odd: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        method = pickle.loads(pickle.dumps(odd[0])).methods["forward"]
        method.interface = replace(method.interface, largest_first=True)
        asked = Mock(side_effect=RuntimeError("no memory"))
        monkeypatch.setattr(Interface, "largest", asked)
        for _ in range(2):
            with pytest.raises(ExecutorchTargetError):
                method.load()
        assert asked.call_count == 2

    def test_pickles_keep_the_report_and_copies_are_the_program(self, odd: Any) -> None:
        twin = pickle.loads(pickle.dumps(odd[0]))
        assert str(qompose.report(twin)) == str(qompose.report(odd[0]))
        assert twin.delegation == odd[0].delegation and twin.buffer == odd[0].buffer
        assert copy.deepcopy(odd[0]) is odd[0]
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(odd[0].methods["forward"])

    def test_threads_get_their_own_results(self, sentences: Any) -> None:
        program, _ = sentences
        batches = [(words(2, 5, seed=s), randn(2, 5, 16, seed=s)) for s in range(24)]
        expected = [program.run(*batch) for batch in batches]
        fresh = pickle.loads(pickle.dumps(program))
        with ThreadPoolExecutor(4) as pool:
            actual = list(pool.map(lambda batch: fresh.run(*batch), batches))
        assert all(torch.equal(a[0], e[0]) for a, e in zip(actual, expected, strict=True))

    def test_an_empty_batch_gives_an_empty_result(self, sentences: Any) -> None:
        args = (words(0, 5), randn(0, 5, 16))
        assert [tuple(y.shape) for y in sentences[0].run(*args)] == [(0, 5, 4)] * 2


class Named:
    """A class of the user's, which files know nothing about."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.fixture
def named() -> Iterator[None]:
    pytree.register_pytree_node(
        Named,
        lambda named: ([named.value], None),
        lambda values, _: Named(*values),
        serialized_type_name="tests.Named",
    )
    yield
    if Named in pytree.SUPPORTED_NODES:
        pytree._deregister_pytree_node(Named)


class TestFiles:
    def test_a_file_is_read_again_with_all_it_knows(self, odd: Any, tmp_path: Path) -> None:
        program, graph = odd
        again = ExecutorchProgram.read(program.save(tmp_path / "odd.pte"))
        assert again.delegation == program.delegation
        assert again.methods["forward"].interface == program.methods["forward"].interface
        close(again.run(*ODD_ARGS, **ODD_KWARGS), graph(*ODD_ARGS, **ODD_KWARGS))
        with pytest.raises(ExecutorchInputError, match="'times'"):
            again.run(ODD_ARGS[0], 4, *ODD_ARGS[2:], **ODD_KWARGS)
        with pytest.raises(qompose.errors.StageError):
            qompose.report(again)

    @pytest.mark.parametrize("content", [b"", b"no program", b"\0" * 4096])
    def test_other_files_are_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.pte"
        path.write_bytes(content)
        with pytest.raises(ExecutorchTargetError, match=r"other\.pte"):
            ExecutorchProgram.read(path)

    def test_a_damaged_file_is_refused(self, odd: Any, tmp_path: Path) -> None:
        path = tmp_path / "half.pte"
        path.write_bytes(odd[0].buffer[: len(odd[0].buffer) // 2])
        with pytest.raises(ExecutorchTargetError, match=r"half\.pte"):
            ExecutorchProgram.read(path)

    def test_saving_replaces_the_whole_file_or_nothing(
        self, odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "model.pte"
        path.write_bytes(b"before")
        monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError("the disk is full")))
        with pytest.raises(OSError, match="full"):
            odd[0].save(path)
        assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
        monkeypatch.undo()
        assert odd[0].save(str(path)) == path
        assert path.read_bytes() == odd[0].buffer and list(tmp_path.iterdir()) == [path]

    def test_a_file_has_the_permissions_that_the_process_gives(
        self, odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And its mask is not touched, as another thread may write a file meanwhile."""
        before = os.umask(0o027)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(os, "umask", Mock(side_effect=AssertionError))
                path = odd[0].save(tmp_path / "model.pte")
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o640

    def test_a_run_changes_no_settings_of_the_process(
        self, odd: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = odd[0]
        expected = program.run(*ODD_ARGS, **ODD_KWARGS)
        with monkeypatch.context() as patched:
            for module, name in ((warnings, "catch_warnings"), (logging.Logger, "setLevel")):
                patched.setattr(module, name, Mock(side_effect=AssertionError(name)))
            found = program.run(*ODD_ARGS, **ODD_KWARGS)
        close(found, expected, step=0)

    @pytest.mark.full
    def test_trees_with_classes_of_the_user_are_flat_once_read(
        self, named: None, tmp_path: Path
    ) -> None:
        wrapping = Model(lambda m, x: Named(m.linear(x)), linear=nn.Linear(8, 8))
        program = qompose.lower(converted(wrapping, randn(2, 8)), "executorch")
        expected = program.run(randn(2, 8)).value
        path = program.save(tmp_path / "n.pte")
        assert torch.equal(ExecutorchProgram.read(path).run(randn(2, 8)).value, expected)
        torch.save([randn(2, 8), expected], tmp_path / "tensors.pt")
        code = (
            "import torch, qompose_xnnpack\n"
            "x, expected = torch.load('tensors.pt')\n"
            "(actual,) = qompose_xnnpack.ExecutorchProgram.read('n.pte').run(x)\n"
            "assert torch.equal(actual, expected)\n"
        )
        python("-c", code, cwd=tmp_path, to_the_end=True)

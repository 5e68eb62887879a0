# SPDX-License-Identifier: Apache-2.0
"""Packages: they run on torch alone, as the model is called, and are whole or not there."""

from __future__ import annotations

import json
import math
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import qompose
import torch
import torch._inductor.package.package
from qompose import UserError
from qompose.errors import CompilationError, InputError
from qompose.lowering.aoti_package import TORCH_NAMESPACES, _described
from qompose.spec import qdq
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tests.core.called_net import X, lowered_net
from tests.core.toy import LINEAR, Model, convert, export, randn, seeded, toy
from tests.processes import python

Patch = pytest.MonkeyPatch


def in_aten(graph: GraphModule) -> GraphModule:
    """The toy's linears as those of torch, on the same integers."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.qompose_toy.linear.default:
            node.target = plain_linear
    return graph


def plain_linear(
    x: Tensor, scale: float, zero: int, weight: Tensor, scales: Tensor, bias: Tensor | None,
    quantize: bool, out_scale: float, out_zero: int, low: int, high: int,
) -> Tensor:  # fmt: skip
    y = nn.functional.linear((x.float() - zero) * scale, weight * scales[:, None], bias)
    steps = torch.round(y / out_scale) + out_zero if quantize else y
    return steps.clamp(low, high).to(torch.int8) if quantize else y


ALONE = """
import sys, torch
model = torch._inductor.aoti_load_package(sys.argv[1])
for (args, kwargs), y in torch.load(sys.argv[2]):
    torch.testing.assert_close(model(*args, **kwargs), y)
assert 'qompose' not in sys.modules
print(*torch._C._dispatch_get_all_op_names())
"""


@pytest.fixture(scope="module")
def model() -> GraphModule:
    return lowered_net(for_compiler=in_aten)


@pytest.fixture(scope="module")
def compiled(model: GraphModule) -> Iterator[Any]:
    """A package in a temporary place, which goes with what runs it."""
    holder = [qompose.compile_lowered(model, "package")]
    path = holder[0].path
    assert path is not None and path.exists()
    yield weakref.proxy(holder[0])
    holder.clear()
    assert not path.parent.exists()


@pytest.mark.full
def test_a_package_is_called_as_the_model_is_and_runs_on_torch_alone(
    model: GraphModule, compiled: Any, tmp_path: Path
) -> None:
    assert compiled.mode == "package"
    factor = torch.tensor(3.0)
    cases = []
    for rows in (6, 2, 33):
        x = randn(rows, 3, seed=rows)
        expected = model(x, factor=factor)
        torch.testing.assert_close(compiled(factor=factor, x=x), expected)
        cases.append((((x,), {"factor": factor}), expected))
    torch.save(cases, tmp_path / "cases.pt")
    printed = python("-I", "-c", ALONE, compiled.path, tmp_path / "cases.pt", to_the_end=True)
    known = {name.partition("::")[0] for name in printed.split()}
    assert known >= TORCH_NAMESPACES, "operators of these are let through"


@pytest.mark.full
def test_inputs_of_another_layout_type_or_shape(model: GraphModule, compiled: Any) -> None:
    """The code of a package looks at none: it would read memory as it is not."""
    factor = torch.tensor(3.0)
    for x in (X.t().contiguous().t(), torch.cat([X, X], 1)[:, :3], X.expand(6, 3)):
        torch.testing.assert_close(compiled(x, factor=factor), model(X, factor=factor))
    with pytest.raises(InputError, match=r"torch\.float64.*torch\.float32"):
        compiled(X.double(), factor=factor)
    with pytest.raises(InputError, match=r"torch\.int64"):
        compiled(X, factor=torch.tensor(3))
    for x in (X[:, :2], randn(65, 3)):  # which it would run
        with pytest.raises(InputError):
            compiled(x, factor=factor)


@pytest.mark.full
def test_numbers_among_the_results_are_numbers() -> None:
    module = Model(
        lambda m, x: {"y": m.linear(x), "n": 3, "rows": x.shape[0]}, linear=nn.Linear(3, 4)
    )
    rows = {0: torch.export.Dim("rows")}
    program = export(seeded(module), X, dynamic_shapes=(rows,))
    result = qompose.lower(convert(program, toy(LINEAR, for_compiler=in_aten), X))
    found = qompose.compile_lowered(result, "package")(X[:2])
    assert (found["n"], found["rows"]) == (3, 2) and type(found["n"]) is type(found["rows"]) is int


def test_a_temporary_package_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CompilationError):
        qompose.compile_lowered(lowered_net(), "package")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("qompose-")]


def memory(m: Any, x: Tensor, at: Tensor) -> Tensor:
    """Two buffers, each of one value at first: torch takes such ones for constants."""
    m.seen.index_copy_(0, at, m.linear(x))
    m.count.copy_(at[-1:] + 0.5)
    return m.seen * m.count


WITH_STATE = """
import json, sys, torch
from torch.export.pt2_archive._package import load_pt2

def made(shape, dtype, values):
    values = [float(value) if isinstance(value, str) else value for value in values]
    values = torch.tensor(values, dtype=getattr(torch, dtype))
    return values.repeat(torch.Size(shape).numel() // len(values)).reshape(shape)

file = load_pt2(sys.argv[1])
methods, described = file.aoti_runners, json.loads(file.extra_files["state.json"])
state = {path: made(**one) for path, one in described.items()}
for method in methods.values():
    own = {name: state[name] for name in method.get_constant_fqns() if name in state}
    method.load_constants(own, check_full_update=False, user_managed=True)
for name, args, y in torch.load(sys.argv[2]):
    torch.testing.assert_close(methods[name](*args), y)
assert 'qompose' not in sys.modules
"""


@pytest.fixture(scope="module")
def memories() -> dict[str, GraphModule]:
    buffers = {"seen": nn.Buffer(torch.zeros(6, 4)), "count": nn.Buffer(torch.full((1,), 0.5))}
    module = seeded(Model(memory, linear=nn.Linear(3, 4), **buffers))
    calls = {name: (X[:n], torch.arange(n)) for name, n in (("prompt", 3), ("token", 1))}
    programs = {name: export(module, *args) for name, args in calls.items()}
    prepared = qompose.prepare_pt2e(programs, toy(LINEAR, for_compiler=in_aten))
    for name, args in calls.items():
        prepared[name](*args)
    return qompose.convert_pt2e(prepared)


def test_described_state_is_json() -> None:
    """Readers in other languages take no Infinity and no NaN; what is one number is written once."""
    state = {
        "mask": torch.tensor([[0.0, -torch.inf]]),
        "unknown": torch.full((3,), torch.nan),
        "seen": torch.zeros(2, 2, dtype=torch.int64),
    }
    described = json.loads(json.dumps(_described(state), allow_nan=False))
    values = {path: [float(value) for value in one["values"]] for path, one in described.items()}
    assert values["mask"] == [0.0, -torch.inf] and values["seen"] == [0]
    assert len(values["unknown"]) == 1 and math.isnan(values["unknown"][0])


@pytest.mark.full
class TestState:
    """What a method writes is there in the next call, of whatever method."""

    def test_of_several_methods(self, memories: Any, tmp_path: Path) -> None:
        lowered, path = qompose.lower(memories), tmp_path / "memory.pt2"
        methods = qompose.compile_lowered(lowered, "package", path=path)
        cases = []
        for name, first, end in (
            *(("prompt", 0, 3), ("token", 3, 4), ("token", 4, 5)),
            *(("prompt", 1, 4), ("token", 5, 6)),
        ):
            args = (X[first:end], torch.arange(first, end))
            expected = lowered[name](*args).clone()
            torch.testing.assert_close(methods[name](*args), expected)
            cases.append((name, args, expected))
        assert all(method.path == path for method in methods.values())
        torch.save(cases, tmp_path / "cases.pt")
        python("-I", "-c", WITH_STATE, path, tmp_path / "cases.pt", to_the_end=True)

    def test_of_one(self, memories: Any) -> None:
        alone = qompose.lower(memories["token"])
        compiled = qompose.compile_lowered(alone, "package")
        for at in (0, 3, 3):
            args = (X[at : at + 1], torch.tensor([at]))
            torch.testing.assert_close(compiled(*args), alone(*args))


class TestRefusals:
    """A file that was there stays, and none is left half-written."""

    def test_operators_of_a_plugin(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt2"
        path.write_text("before")
        with pytest.raises(
            CompilationError, match=r"linear_1 in second: qompose_toy\.linear\.default"
        ):
            qompose.compile_lowered(lowered_net(), "package", path=path)
        assert [(p, p.read_text()) for p in tmp_path.iterdir()] == [(path, "before")]

    def test_operators_that_were_compiled_before_in_this_process(self, tmp_path: Path) -> None:
        model = lowered_net()
        qompose.compile_lowered(model, options={"fx-graph-cache": False})  # torch does all of it
        with pytest.raises(CompilationError, match=r"qompose_toy\.linear"):
            qompose.compile_lowered(model, "package", path=tmp_path / "model.pt2")
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        ("function", "named"),
        [
            (lambda m, x: m.calls.copy_(x[0, :1]) + m.last.copy_(x[0, 1:2]) + m.linear(x), "calls"),
            (lambda m, x: m.linear(x) + m.calls.add_(1), "calls"),
            (lambda m, x: m.calls.copy_(x[0, :1] + m.calls.exp()) + m.linear(x), "calls"),
            (lambda m, x: (m.linear(x), None), "output 1.*None"),
            (lambda m, x: (m.linear(x), 2, True), "output 2.*True"),
            (lambda m, x: (m.linear(x), 0.5), r"output 1.*0\.5"),
        ],
        ids=[
            "state in one memory",
            "state that counts",
            "state that is read",
            "results that are none",
            "results that are bools",
            "results that are floats",
        ],
    )
    def test_models(self, function: Any, named: str, tmp_path: Path) -> None:
        calls = torch.zeros(2)
        buffers = {"calls": nn.Buffer(calls[:1]), "last": nn.Buffer(calls[1:])}
        program = export(seeded(Model(function, linear=nn.Linear(3, 4), **buffers)), X)
        model = qompose.lower(convert(program, toy(LINEAR, for_compiler=in_aten), X))
        with pytest.raises(CompilationError, match=named):
            qompose.compile_lowered(model, "package", path=tmp_path / "model.pt2")
        assert not any(tmp_path.iterdir())

    def test_a_package_that_cannot_be_loaded(self, tmp_path: Path, monkeypatch: Patch) -> None:
        def fail(path: str, name: str) -> None:
            assert Path(path).exists()
            raise RuntimeError("not today")

        monkeypatch.setattr(torch._inductor, "aot_compile", lambda *args, **options: [])
        monkeypatch.setattr(torch._inductor.package.package, "load_package", fail)
        path = tmp_path / "model.pt2"
        path.write_text("before")
        with pytest.raises(CompilationError, match="not today"):
            qompose.compile_lowered(lowered_net(for_compiler=in_aten), "package", path=path)
        assert [(p, p.read_text()) for p in tmp_path.iterdir()] == [(path, "before")]

    def test_a_full_disk_is_not_the_compilers_fault(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        def write(*args: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch._inductor, "aot_compile", write)
        with pytest.raises(OSError, match="No space") as raised:
            model = lowered_net(for_compiler=in_aten)
            qompose.compile_lowered(model, "package", path=tmp_path / "model.pt2")
        assert raised.value.errno == 28
        assert not any(tmp_path.iterdir())

    def test_what_torch_cannot_compile(self, tmp_path: Path) -> None:
        def fail(graph: object) -> None:
            raise RuntimeError("out of ideas")

        path = tmp_path / "model.pt2"
        with pytest.raises(CompilationError, match="RuntimeError: out of ideas"):
            qompose.compile_lowered(
                lowered_net(for_compiler=in_aten),
                "package",
                path=path,
                options={"post_grad_custom_pre_pass": fail},
            )
        assert not any(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("model.bin", "model.bin"),
            ("nowhere/model.pt2", "nowhere"),
            ("folder.pt2", "directory"),
            (7, "got 7"),
        ],
    )
    def test_paths(self, path: Any, message: str, tmp_path: Path, monkeypatch: Patch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder.pt2").mkdir()
        with pytest.raises(UserError, match=message):
            qompose.compile_lowered(lowered_net(), "package", path=path)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_simulated_region_needs_no_operator_of_its_own(
    compiles: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Blocks have operators of qompose, which are taken apart for the package."""
    given: list[GraphModule] = []

    def write(graph: GraphModule, args: Any, kwargs: Any, options: Any) -> list[str]:
        given.append(graph)
        return []

    if not compiles:
        monkeypatch.setattr(torch._inductor, "aot_compile", write)
        returned = pytree.treespec_dumps(pytree.tree_structure(0))
        loader = SimpleNamespace(
            get_call_spec=lambda: ["", returned], boxed_run=lambda values: [given[0](*values)]
        )
        loaded = SimpleNamespace(loader=loader, get_constant_fqns=list)
        monkeypatch.setattr(
            torch._inductor.package.package, "load_package", lambda path, name: loaded
        )
    weight = qompose.QuantizationSpec(
        torch.int8, qompose.observers.PerBlockMinMaxObserver, -127, 127,
        torch.per_channel_symmetric, block_size=(2, 2),
    )  # fmt: skip
    config = qompose.QuantizationConfig(None, None, weight, name="blocks")
    program = export(seeded(nn.Linear(4, 2)), randn(3, 4))
    converted = convert(program, toy(LINEAR, config=config), randn(3, 4))
    with pytest.warns(qompose.QomposeWarning):
        model = qompose.lower(converted)
    assert {n.target for n in model.graph.nodes} & qdq.IN_ATEN.keys()
    compiled = qompose.compile_lowered(model, "package", path=tmp_path / "model.pt2")
    torch.testing.assert_close(compiled(randn(3, 4)), model(randn(3, 4)))
    assert compiled.path == tmp_path / "model.pt2"
    assert [*tmp_path.iterdir()] == [compiled.path]


ROWS = randn(4, 8)
INTEGERS = torch.arange(-16, 16, dtype=torch.int8).reshape(4, 8)
SCALE, ZERO = randn(4, 2).abs() + 0.1, torch.tensor([[1, 0], [2, -3], [0, 0], [5, 1]])
PER_TOKEN = (SCALE[:, :1], ZERO[:, :1])
CASES: dict[Any, tuple[Any, ...]] = {
    qdq.quantize_per_group: (ROWS, SCALE, ZERO, -8, 7, torch.int8, 4),
    qdq.dequantize_per_group: (INTEGERS, SCALE, ZERO, -8, 7, torch.int8, 4, torch.float32),
    qdq.quantize_per_token: (ROWS, *PER_TOKEN, -128, 127, torch.int8),
    qdq.dequantize_per_token: (INTEGERS, *PER_TOKEN, -8, 7, torch.int8, torch.float32),
    qdq.choose_qparams_per_token: (ROWS, torch.int8),
    qdq.choose_qparams_per_token_symmetric: (ROWS, torch.int8),
    qdq.quantize_per_block: (ROWS, SCALE, ZERO, -8, 7, torch.int8),
    qdq.dequantize_per_block: (INTEGERS, SCALE, ZERO, -8, 7, torch.float32),
    qdq.quantize_per_channel_float: (
        *(ROWS, SCALE[:, 0], ZERO[:, 0] + 0.5, 0, 0, 255, torch.uint8),
    ),
}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13, about itself
def test_what_stands_for_operators_gives_the_same_bits() -> None:
    assert CASES.keys() == qdq.IN_ATEN.keys()

    def all_of(m: Any, inputs: list[Tensor]) -> list[Any]:
        cases = zip(CASES.items(), inputs, strict=True)
        return [operator(x, *rest) for (operator, (_, *rest)), x in cases]

    inputs = [first.clone() for first, *_ in CASES.values()]
    program = torch.export.export(Model(all_of), (inputs,)).run_decompositions(qdq.IN_ATEN)
    assert {n.target.namespace for n in program.graph.nodes if n.op == "call_function"} == {"aten"}
    expected, actual = all_of(None, inputs), program.module()(inputs)
    for operator, one, other in zip(CASES, expected, actual, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0, msg=lambda m: f"{operator}: {m}")  # noqa: B023

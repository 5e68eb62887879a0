# SPDX-License-Identifier: Apache-2.0
"""Compiling lowered models in this process: what is kept, what is refused, what is left as it was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose import UserError
from qompose.backend import Finished, Target
from qompose.errors import (
    CompilationError,
    ConfigError,
    InputError,
    MemberError,
    StageError,
    TargetError,
)
from qompose.lowering import compilation
from qompose.lowering.aoti_package import refused
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from tests.core.called_net import X, lowered_net
from tests.core.toy import LINEAR, Model, convert, export, randn, seeded, toy


def lowered(module: nn.Module, x: Tensor = X) -> GraphModule:
    result: GraphModule = qompose.lower(convert(export(seeded(module), x), toy(LINEAR), x))
    return result


def _settings() -> dict[str, str]:
    """Inductor's, as text; of a pass that torchao registers, whose every copy is another, its class."""
    settings = torch._inductor.config.get_config_copy()
    return {
        name: type(value).__name__ if name.endswith("_custom_pass") else repr(value)
        for name, value in settings.items()
    }


@pytest.fixture(autouse=True)
def nothing_global_changes() -> Iterator[None]:
    before = _settings()
    gradients = torch.is_grad_enabled()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert _settings() == before
    assert torch.is_grad_enabled() == gradients


def test_names_keywords_and_sizes_are_those_of_the_model_and_compile_once() -> None:
    model = lowered_net()
    compiled = qompose.compile_lowered(model)
    assert compiled.mode == "default" and compiled.path is None
    graphs = counters["stats"]["unique_graphs"]
    for rows in (6, 2, 33):
        x, factor = randn(rows, 3, seed=rows), torch.tensor(3.0)
        expected = model(x, factor=factor)["y"]
        for result in (compiled(x, factor=factor), compiled(factor=factor, x=x)):
            torch.testing.assert_close(result["y"], expected)
        assert not result["y"].requires_grad
    assert counters["stats"]["unique_graphs"] == graphs == 1
    with pytest.raises(TypeError, match="factor"):
        compiled(X)
    with pytest.raises(TypeError, match="scale"):
        compiled(X, factor=factor, scale=1)


@pytest.mark.usefixtures("traced_alone")
def test_no_layout_or_type_of_an_input_compiles_anew() -> None:
    model, factor = lowered_net(), torch.tensor(3.0)
    compiled = qompose.compile_lowered(model)
    graphs = counters["stats"]["unique_graphs"]
    for x in (X.t().contiguous().t(), torch.cat([X, X], 1)[:, :3], X[:1].expand(6, 3)):
        expected = model(x, factor=factor)["y"]
        torch.testing.assert_close(compiled(x, factor=factor)["y"], expected)
    for wrong in (X.double(), X.half(), X.numpy(), X.tolist()):
        for form in (model, compiled):
            with pytest.raises(InputError, match=r"torch\.float32") as refused:
                form(wrong, factor=factor)
            assert refused.value.name == "x"
    assert counters["stats"]["unique_graphs"] == graphs == 1


def test_no_call_looks_at_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are nobody else's, and a decoder has hundreds."""
    compiling, graphs = torch.compile, []
    monkeypatch.setattr(
        torch, "compile", lambda graph, **how: graphs.append(graph) or compiling(graph, **how)
    )
    program = export(seeded(nn.Linear(3, 4)), X, dynamic_shapes=({0: torch.export.Dim("n")},))
    qompose.compile_lowered(qompose.lower(convert(program, toy(LINEAR), X)))
    (graph,) = graphs
    (entry,) = _debug_get_cache_entry_list(graph.__code__)
    guards = str(entry.guard_manager)
    assert "L['values'][0]" in guards
    assert "_parameters" not in guards and "_buffers" not in guards


def test_programs_of_the_same_sizes_have_code_of_their_own() -> None:
    """One of another's was taken for a size that the other was compiled for when it was first called."""
    rows, x = torch.export.Dim("rows"), randn(1, 2)
    models = [
        qompose.lower(
            convert(
                export(seeded(nn.Linear(2, 2), seed), X[:, :2], dynamic_shapes=({0: rows},)),
                toy(LINEAR),
                X[:, :2],
            )
        )
        for seed in (0, 1)
    ]
    for compiled, model in [(qompose.compile_lowered(model), model) for model in models]:
        torch.testing.assert_close(compiled(x), model(x))


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Dynamo traces is run as it is, to save time."""
    compiling = torch.compile

    def tracing(f: Any, **how: Any) -> Any:
        return compiling(f, **{"backend": "eager", **how, "options": None})

    monkeypatch.setattr(torch, "compile", tracing)


@pytest.mark.usefixtures("traced_alone")
def test_all_combinations_of_no_one_and_more_rows_are_compiled() -> None:
    """Beyond its own limit of eight Dynamo runs a program uncompiled, and says so in a log alone."""
    sizes, x = {0: torch.export.Dim("rows"), 1: torch.export.Dim("columns")}, randn(3, 4, 2)
    program = export(seeded(nn.Linear(2, 2)), x, dynamic_shapes=(sizes,))
    compiled = qompose.compile_lowered(qompose.lower(convert(program, toy(LINEAR), x)))
    shapes = [(rows, columns) for rows in (0, 1, 5) for columns in (0, 1, 6)]
    for shape in shapes:
        compiled(torch.zeros(*shape, 2))
    with torch.inference_mode():
        x = torch.zeros(7, 8, 2)
    compiled(x)
    assert counters["stats"]["unique_graphs"] == len(shapes) + 1


def test_no_call_of_fixed_sizes_is_looked_at_by_torch_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it looks at takes longer than a small model; sizes are checked before."""
    monkeypatch.setattr(torch, "compile", lambda graph, **how: pytest.fail("traced again"))
    model = lowered(Model(lambda m, x: {"y": [m.linear(x), None], "n": 2}, linear=nn.Linear(3, 4)))
    compiled = qompose.compile_lowered(model)
    found, expected = compiled(X), model(X)
    torch.testing.assert_close(found["y"][0], expected["y"][0])
    assert type(found["y"]) is list and found["y"][1] is None and found["n"] == 2
    with pytest.raises(InputError):
        compiled(X[:1])


def test_autocast_changes_nothing() -> None:
    product = Model(lambda m, x: m.linear(x) @ m.w, linear=nn.Linear(3, 4), w=nn.Parameter(X[:4]))
    model = lowered(product)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = qompose.compile_lowered(model)
        within = compiled(X)
    torch.testing.assert_close(within, model(X))
    torch.testing.assert_close(compiled(X), model(X))


@pytest.mark.usefixtures("traced_alone")
def test_a_body_of_dynamic_sizes() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.linear(torch.cond(x.sum() > 0, torch.neg, torch.sin, (x,)))

    rows = ({0: torch.export.Dim("n")},)
    program = export(seeded(Model(forward, linear=nn.Linear(3, 3))), X, dynamic_shapes=rows)
    model = qompose.lower(convert(program, toy(LINEAR), X))
    compiled = qompose.compile_lowered(model)
    for x in (X.abs(), -X[:5].abs()):
        torch.testing.assert_close(compiled(x), model(x))


def test_sizes_may_depend_on_values() -> None:
    picking = Model(lambda m, x: (m.linear(x), x.nonzero()), linear=nn.Linear(3, 4))
    model = lowered(picking)
    compiled = qompose.compile_lowered(model)
    for x in (X, X.relu()):
        torch.testing.assert_close(compiled(x), model(x))


def test_what_a_program_writes_to_an_input_arrives_whatever_its_layout() -> None:
    writer = Model(lambda m, x: m.linear(x.mul_(2)), linear=nn.Linear(3, 4))
    model = lowered(writer, X.clone())
    compiled = qompose.compile_lowered(model)
    for x in (X.clone(), X.t().contiguous().t()):
        given = x.clone()
        expected = model(given)
        torch.testing.assert_close(compiled(x), expected)
        assert torch.equal(x, given) and not torch.equal(x, X)


def test_inputs_that_a_program_only_reads_are_not_written_to() -> None:
    """They may be expanded, where torch refuses to write, or views of one that is written."""
    writer = Model(lambda m, x, y: m.linear(x.mul_(2)) + y[:, :1], linear=nn.Linear(3, 4))
    model = qompose.lower(convert(export(writer, X.clone(), X.clone()), toy(LINEAR), X, X))
    compiled, row = qompose.compile_lowered(model), X[:1].expand(6, 3)
    torch.testing.assert_close(compiled(X.clone(), row), model(X.clone(), row))
    whole = X.t().contiguous().t()
    expected = X.t().contiguous().t()
    torch.testing.assert_close(
        compiled(whole, whole.view(whole.shape)), model(expected, expected.view(expected.shape))
    )
    assert torch.equal(whole, 2 * X)
    torch.testing.assert_close(compiled(whole, whole), model(expected, expected))
    assert torch.equal(whole, 4 * X)
    dense, expected = X.clone(), X.clone()
    torch.testing.assert_close(
        compiled(dense, dense.view(dense.shape)), model(expected, expected.view(expected.shape))
    )
    assert torch.equal(dense, 2 * X)


@pytest.mark.full
def test_max_autotune() -> None:
    model = lowered(nn.Linear(3, 4))
    torch.testing.assert_close(qompose.compile_lowered(model, "max-autotune")(X), model(X))


def test_state_begins_where_the_lowered_model_is_and_is_apart_from_it() -> None:

    def counting(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        m.calls.add_(1)
        return m.linear(x), m.calls.clone()

    model = lowered(Model(counting, linear=nn.Linear(3, 4), calls=nn.Buffer(torch.zeros(1))))
    model(X)
    compiled = qompose.compile_lowered(model)
    assert [float(compiled(X)[1]) for _ in range(2)] == [2.0, 3.0]
    assert [float(model(X)[1]) for _ in range(2)] == [2.0, 3.0]


def test_converting_the_lowered_model_leaves_the_compiled_one() -> None:
    model = lowered(nn.Linear(3, 64))  # so many that they are no literals in the code
    expected = model(X)
    compiled = qompose.compile_lowered(model)
    model.double()
    assert model.bias.dtype is torch.float64
    torch.testing.assert_close(compiled(X), expected)


def test_compiled_code_is_not_pickled_and_copies_share_it() -> None:
    compiled = qompose.compile_lowered(lowered(nn.Linear(3, 4)))
    with pytest.raises(UserError, match=r"qompose\.save"):
        pickle.dumps(compiled)
    assert copy.deepcopy(compiled) is compiled


def test_a_program_that_cannot_run_on_zeros_is_compiled() -> None:
    picky = Model(lambda m, x: torch.linalg.cholesky(m.linear(x) * 0 + x), linear=nn.Linear(3, 3))
    compiled = qompose.compile_lowered(lowered(picky, torch.eye(3)))
    torch.testing.assert_close(compiled(torch.eye(3) * 4), torch.eye(3) * 2)


def test_a_backend_rewrites_its_operators_in_a_copy() -> None:
    model = lowered_net(for_compiler=zeros_for_sigmoid)
    before = model.code
    result = qompose.compile_lowered(model)(X, factor=torch.tensor(1.0))["y"]
    assert (result - model.second.bias).abs().max() < 1e-2
    assert model.code == before


def zeros_for_sigmoid(graph: GraphModule) -> GraphModule:
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.sigmoid.default:
            node.target = torch.ops.aten.zeros_like.default
    return graph


def fail(graph: GraphModule) -> GraphModule:
    raise RuntimeError("out of ideas")


def test_a_backend_asks_for_options_and_users_count_before_it() -> None:
    ours: list[Any] = []
    users: list[Any] = []
    model = lowered_net(compiler_options=lambda graph: {"post-grad-custom-pre-pass": ours.append})
    qompose.compile_lowered(model)
    assert len(ours) == 1
    qompose.compile_lowered(model, options={"post_grad_custom_pre_pass": users.append})
    assert (len(ours), len(users)) == (1, 1)


def test_options_that_map_operators_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each of several backends can bring code of its operators, and users of theirs."""
    name = "aot_inductor.custom_ops_to_c_shims"
    first, second, third = torch.ops.aten.add, torch.ops.aten.mul, torch.ops.aten.sub
    seen: list[Any] = []
    monkeypatch.setattr(compilation, "_compiled", lambda *arguments: seen.append(arguments[-1]))
    given = {name: {first: ["backend"], second: ["backend"]}}
    model = lowered_net(compiler_options=lambda graph: given)
    qompose.compile_lowered(model, options={name: {second: ["user"], third: ["user"]}})
    assert seen[0][name] == {first: ["backend"], second: ["user"], third: ["user"]}


@pytest.mark.parametrize(
    ("facts", "kind", "named"),
    [
        ({"for_compiler": fail}, MemberError, "RuntimeError: out of ideas"),
        ({"for_compiler": lambda graph: None}, ConfigError, "None"),
        ({"compiler_options": fail}, MemberError, "RuntimeError: out of ideas"),
        ({"compiler_options": lambda graph: {"frezing": True}}, ConfigError, "'frezing'"),
        ({"compiler_options": lambda graph: 3}, ConfigError, "mapping"),
    ],
    ids=["rewriting raises", "no graph", "options raise", "unknown", "no mapping"],
)
def test_a_backend_that_cannot_is_named(facts: dict[str, Any], kind: Any, named: str) -> None:
    (hook,) = facts
    with pytest.raises(kind, match=f"backend 'toy': {hook}.*{named}"):
        qompose.compile_lowered(lowered_net(**facts))


def test_backends_without_claims_are_not_asked() -> None:
    quantizer = qompose.compose(toy(LINEAR), toy(LINEAR, name="idle", for_compiler=fail))
    model = qompose.lower(convert(export(seeded(nn.Linear(3, 4)), X), quantizer, X))
    torch.testing.assert_close(qompose.compile_lowered(model)(X), model(X))


class TestRefusals:
    """Each before any work is done."""

    def test_not_lowered(self) -> None:
        with pytest.raises(StageError, match="compile"):
            qompose.compile_lowered(convert(export(seeded(nn.Linear(3, 4)), X), toy(LINEAR), X))

    def test_another_target(self) -> None:
        chip = Target("chip", lambda model, signature: Finished(model))
        rule = replace(LINEAR, kernels={"chip": LINEAR.kernels["torch"]})
        converted = convert(export(seeded(nn.Linear(3, 4)), X), toy(rule, targets=(chip,)), X)
        with pytest.raises(TargetError, match="'chip'"):
            qompose.compile_lowered(qompose.lower(converted, "chip"))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"mode": "max-autotunes"}, "'max-autotune'"),
            ({"mode": None}, "got None"),
            ({"path": "model.pt2"}, "mode='default'"),
            ({"options": ["max_autotune"]}, r"\['max_autotune'\]"),
            ({"options": {1: 2}}, "{1: 2}"),
            ({"options": {"freezing": False}}, "freezing"),
            ({"options": {"max_autotun": True}}, "'max_autotun'"),
        ],
    )
    def test_arguments(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            qompose.compile_lowered(lowered(nn.Linear(3, 4)), **arguments)

    @pytest.mark.parametrize("mode", ["default", "package"])
    def test_no_compiler(self, mode: str) -> None:
        model = lowered(nn.Linear(3, 4))
        missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
        with missing, pytest.raises(CompilationError, match="CXX"):
            qompose.compile_lowered(model, mode)

    def test_what_torch_cannot_compile(self) -> None:
        model = lowered(nn.Linear(3, 4))
        wrong = {"post_grad_custom_pre_pass": fail}
        with pytest.raises(CompilationError, match="RuntimeError: out of ideas"):
            qompose.compile_lowered(model, options=wrong)


def test_a_type_without_a_name_in_files_has_its_remedy() -> None:
    """torch's own advice names a function that hardly anybody calls."""
    torch_says = (
        "Please update your _register_pytree_node call with a `serialized_type_name` kwarg."
    )
    assert "register_dataclass" in str(refused(NotImplementedError(torch_says)))

# SPDX-License-Identifier: Apache-2.0
"""Copies that share parameters, paths of modules, and what survives an export."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import threading
from typing import Any

import pytest
import torch
from qompose.program import graph
from qompose.program.graph import (
    arguments_of,
    constant_of,
    copy_graph_module,
    describe,
    free_attribute,
    get_attribute,
    is_float_tensor,
    layout_of,
    module_path,
    module_stack,
    one_thread_at_a_time,
    refresh,
    set_attribute,
    sizes_differ,
)
from qompose.program.meta import claim_of, clear_origin, operator_of, tag, tag_of
from torch import nn

from tests.core.toy import Call, Model, export, graph_text, randn, seeded

aten = torch.ops.aten


def net() -> nn.Module:
    parts = {"body": nn.Sequential(nn.Linear(3, 3)), "ids": nn.Buffer(torch.arange(3))}
    return seeded(Model(lambda m, x, n: (m.body(x) + m.ids, n + 1, *x.max(dim=0)), **parts))


X, N = randn(4, 3), torch.arange(4)


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=2, max=9)
    return export(net(), X, N, dynamic_shapes=({0: batch}, {0: batch}))


def test_a_copy_shares_parameters_and_leaves_the_original_alone(program: Any) -> None:
    module = program.module()
    before = graph_text(module)
    twin = copy_graph_module(module)
    for name, parameter in twin.named_parameters():
        assert parameter is module.get_parameter(name)
    for node in list(twin.graph.nodes):
        node.meta["mine"] = True
    (linear,) = (n for n in twin.graph.nodes if n.target is aten.linear.default)
    linear.replace_all_uses_with(linear.args[0])
    set_attribute(twin, "body.0.weight", torch.zeros(3, 3))
    twin.recompile()
    assert graph_text(module) == before
    assert not any("mine" in node.meta for node in module.graph.nodes)
    assert bool(module.get_parameter("body.0.weight").any())


def test_a_copy_computes_the_same_without_shape_guards(program: Any) -> None:
    """They would refuse batches that a quantized model can take, and their code cannot be copied."""
    module = program.module()
    if not any("_guards_fn" in str(node.target) for node in module.graph.nodes):
        pytest.fail("this torch adds no guards: the code that drops them can go")
    twin = copy_graph_module(module)
    assert not any("_guards_fn" in str(node.target) for node in twin.graph.nodes)
    assert not any("_guards_fn" in name for name, _ in twin.named_modules())
    torch.testing.assert_close(twin(X, N), module(X, N), rtol=0, atol=0)


def test_state_that_nothing_reads_is_dropped(program: Any) -> None:
    twin = copy_graph_module(program.module())
    (linear,) = (n for n in twin.graph.nodes if n.target is aten.linear.default)
    linear.replace_all_uses_with(linear.args[0])
    twin.graph.erase_node(linear)
    clean = refresh(twin)
    assert set(clean.state_dict()) == {"ids"}
    clean.graph.lint()


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_kept(program: Any, training: bool) -> None:
    module = program.module()
    nn.Module.train(module, training)  # an exported module's own `train` refuses
    assert copy_graph_module(module).training is training
    assert refresh(copy_graph_module(module)).training is training


@pytest.mark.parametrize("strict", [False, True], ids=["default export", "strict export"])
def test_paths_are_the_users_own(strict: bool) -> None:
    module = torch.export.export(net(), (X, N), strict=strict).module(check_guards=False)
    (linear,) = (n for n in module.graph.nodes if n.target is aten.linear.default)
    assert module_path(linear) == "body.0"
    assert [path for path, _ in module_stack(linear)] == ["", "body", "body.0"]
    assert [kind.rpartition(".")[2] for _, kind in module_stack(linear)][1:] == [
        "Sequential", "Linear",
    ]  # fmt: skip
    assert describe(linear) == "linear (aten.linear in body.0)"
    (add,) = (n for n in module.graph.nodes if n.name == "add")
    assert module_path(add) == ""
    assert describe(add) == "add (aten.add.Tensor)"


def test_kinds_of_values(program: Any) -> None:
    nodes = {node.name: node for node in program.module(check_guards=False).graph.nodes}
    floats = {name for name, node in nodes.items() if is_float_tensor(node)}
    assert {"x", "linear", "add", "body_0_weight", "getitem"} <= floats
    assert not {"n", "add_1", "ids", "max_1", "getitem_1", "output"} & floats
    assert not is_float_tensor(2.0)
    assert constant_of(nodes["linear"]) is None
    assert constant_of(nodes["ids"]).tolist() == [0, 1, 2]  # type: ignore[union-attr]


def test_a_free_path_is_found_among_thousands_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module, asked = nn.Module(), list[str]()
    for name in ("n", *(f"n_{i}" for i in range(1, 1000))):
        set_attribute(module, name, torch.ones(1))
    held = graph.holds
    monkeypatch.setattr(graph, "holds", lambda m, name: asked.append(name) or held(m, name))
    assert free_attribute(module, "n") == "n_1000"
    assert len(asked) < 30


def test_attributes_by_path() -> None:
    module = nn.Module()
    set_attribute(module, "a.b.weight", torch.ones(2))
    assert isinstance(get_attribute(module, "a.b"), nn.Module)
    assert dict(module.named_buffers()).keys() == {"a.b.weight"}
    assert free_attribute(module, "a.b.weight") == "a.b.weight_1"
    assert free_attribute(module, "a.c.weight") == "a.c.weight"
    set_attribute(module, "a.b.weight_1", torch.ones(1))
    assert free_attribute(module, "a.b.weight") == "a.b.weight_2"
    set_attribute(module, "a.b.weight", nn.Parameter(torch.zeros(2)))
    assert set(module.state_dict()) == {"a.b.weight", "a.b.weight_1"}
    assert isinstance(get_attribute(module, "a.b.weight"), nn.Parameter)


def test_tags_add_up_and_survive_a_save(program: Any) -> None:
    module = program.module(check_guards=False)
    (linear,) = (n for n in module.graph.nodes if n.target is aten.linear.default)
    linear.meta["custom"] = {"theirs": 1}
    tag(linear, claim=3)
    tag(linear, rule="linear")
    assert [tag_of(linear, name) for name in ("claim", "rule", "x")] == [3, "linear", None]
    assert linear.meta["custom"]["theirs"] == 1
    clear_origin(linear)
    assert linear.meta["custom"] == {"theirs": 1}
    assert claim_of(linear) is None and operator_of(linear) is None
    tag(linear, claim=3, operator="linear")
    assert claim_of(linear) == 3 and operator_of(linear) == "linear"
    again = torch.export.export(module, (X, N))
    file = io.BytesIO()
    torch.export.save(again, file)
    file.seek(0)
    loaded = torch.export.load(file)
    (linear,) = (n for n in loaded.graph.nodes if n.target is aten.linear.default)
    assert tag_of(linear, "claim") == 3


def test_arguments_have_names_of_the_schema_however_they_are_given() -> None:
    program = export(Call(lambda x: torch.add(torch.add(x, x), x, alpha=3)), X)
    plain, scaled = (arguments_of(n) for n in program.graph.nodes if n.op == "call_function")
    assert [*plain] == ["self", "other", "alpha"] and (plain["alpha"], scaled["alpha"]) == (1, 3)
    names = [node.name for node in (plain["self"], scaled["self"], scaled["other"])]
    assert names == ["inputs_0", "add", "inputs_0"]


def test_tied_parameters_have_one_layout() -> None:
    x = torch.zeros(4, 4)
    others = x.t(), x[:2], x[2:], x.view(16), x.view(torch.int32), x.clone()
    assert len({layout_of(one) for one in (x, x.view(4, 4), *others)}) == 1 + len(others)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_forked_while_a_thread_traces_does_not_wait_for_it() -> None:
    held, done = threading.Event(), threading.Event()
    tracing = threading.Thread(target=one_thread_at_a_time(lambda: held.set() or done.wait(20)))
    tracing.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=one_thread_at_a_time(int))
    child.start()
    child.join(5)
    done.set()
    tracing.join()
    assert child.exitcode == 0


def test_sizes_that_are_known_to_differ() -> None:
    """In the example, or because one is a number; what is expressed differently does not, as such."""
    x = torch.arange(8)
    dynamic_shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = export(Model(lambda m, x: (x, x.nonzero())), x, dynamic_shapes=dynamic_shapes)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    batch, unknown = (node.meta["val"].shape[0] for node in output.args[0])
    differ = [
        ((batch,), (batch + 1,)),
        ((batch,), (8,)),
        ((4, 3), (4, 3, 1)),
        ((unknown,), (unknown + 1,)),
    ]
    may_be_equal = [
        ((batch, 3), (batch, 3)),
        ((batch,), (batch // 4 * 4,)),
        ((batch // 4 - batch // 4 % 2,), (2,)),
        ((unknown,), (8,)),
        ((unknown,), (batch,)),
    ]
    guards = len(batch.node.shape_env.guards)
    assert [sizes_differ(*pair) for pair in differ] == [True] * 4
    assert [sizes_differ(*pair) for pair in may_be_equal] == [False] * 5
    assert len(batch.node.shape_env.guards) == guards and batch.node.maybe_as_int() is None


def test_examples_are_kept_as_long_as_a_program_has_them() -> None:
    """They hold the mode by which they are found, which held them for good."""

    def example() -> Any:
        program = export(nn.Linear(3, 3), randn(2, 3)).module(check_guards=False)
        like = next(node for node in program.graph.nodes if node.op == "call_function")
        found = graph.example_of(torch.zeros(5), like)
        assert graph.example_of(torch.ones(5), like) is found
        return found

    gc.collect()
    before = len(graph._EXAMPLES)
    for _ in range(4):
        example()
    gc.collect()
    assert len(graph._EXAMPLES) <= before + 1  # torch keeps the last mode

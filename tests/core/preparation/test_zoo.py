# SPDX-License-Identifier: Apache-2.0
"""The first guarantee: a quantizer that annotates nothing changes nothing, on every model of the zoo."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import qompose
import torch
from torch.utils import _pytree as pytree

from tests.core.toy import NullQuantizer, graph_text, prepare
from tests.sampling import one_of
from tests.zoo import ZOO, ZooModel, tagged

MODELS = [m for m in ZOO if "transformers" not in m.tags or find_spec("transformers")]


def assert_same_outputs(expected: Any, actual: Any) -> None:
    """The same structure, and the same bits in tensors of the same types."""
    assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
    for one, other in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(_bits(one), _bits(other))
        else:
            assert one == other


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The integers behind floats, so that NaN equals NaN and -0.0 is not 0.0."""
    return tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.nan_to_num()


def fingerprint(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """All of a program that prepare and convert must leave alone."""
    digest = hashlib.sha256(graph_text(program.graph_module).encode())
    tensors = {name: (id(t), t._version) for name, t in program.state_dict.items()}
    constants = {name: id(value) for name, value in program.constants.items()}
    meta = [sorted(map(str, node.meta)) for node in program.graph.nodes]
    return {"graph": digest.hexdigest(), "tensors": tensors, "constants": constants, "meta": meta}


def _operators(module: torch.fx.GraphModule) -> list[tuple[Any, Any]]:
    return [
        (node.target, getattr(node.meta.get("val"), "dtype", None))
        for node in module.graph.nodes
        if node.op == "call_function"
    ]


BODIES = {"cond_nested", "loop_two_values", "scan_two_values", "map_rows", "mixed_regions"}


def of_each_kind(models: Iterable[ZooModel]) -> list[Any]:
    """Models for every run: the first with each tag, and one with each kind of body; a third of the others
    for the full run, and the rest for the long one."""
    seen: set[str] = set()
    cases = []
    for number, model in enumerate(models):
        new, later = model.tags - seen, pytest.mark.long if number % 3 else pytest.mark.full
        marks = [] if new or model.name in BODIES else [later]
        cases.append(pytest.param(model, marks=marks))
        seen |= model.tags
    return cases


@pytest.mark.parametrize("model", of_each_kind(MODELS), ids=str)
def test_a_null_quantizer_changes_no_bit_and_leaves_the_program_alone(model: ZooModel) -> None:
    inputs, mutates = model.inputs(), "mutation" in model.tags
    # One model writes to a buffer of its own on every call.
    export = model.fresh_export if mutates else model.export
    exported, program, again = export().module(), export(), export()
    before, operators = fingerprint(program), _operators(program.module(check_guards=False))
    prepared = prepare(program, NullQuantizer())
    converted = qompose.convert_pt2e(prepare(again, NullQuantizer()) if mutates else prepared)
    with torch.no_grad():  # outside of exports, which would hold no regions without gradients
        expected = exported(*inputs)
        assert_same_outputs(expected, prepared(*inputs))
        assert_same_outputs(expected, converted(*inputs))
    if not mutates:
        assert fingerprint(program) == before
        assert _operators(prepared) == _operators(converted) == operators


@pytest.mark.parametrize(
    "model", one_of(5, [m for m in tagged(without="transformers") if m.dynamic_shapes]), ids=str
)
def test_dynamic_dimensions_stay_dynamic(model: ZooModel) -> None:
    program = model.export(dynamic=True)
    converted = qompose.convert_pt2e(prepare(program, NullQuantizer()))
    before, after = (
        [_symbols(n) for n in g.graph.nodes if n.op == "placeholder" and _symbols(n)]
        for g in (program.module(check_guards=False), converted)
    )
    assert before and before == after


def _symbols(node: torch.fx.Node) -> list[str]:
    sizes = getattr(node.meta.get("val"), "shape", ())
    return [str(size) for size in sizes if isinstance(size, torch.SymInt)]

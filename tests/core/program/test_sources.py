# SPDX-License-Identifier: Apache-2.0
"""What operators come from: partitions of programs exported by default beside strictly exported ones."""

from __future__ import annotations

import operator
from collections import Counter
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from qompose.program.aten_operators import KEY, Origin, with_sources, without_sources
from qompose.program.control_flow import graphs_in
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions
from torch.nn import functional as F

from tests.core.toy import Call, Model, randn
from tests.sampling import at_once
from tests.zoo import by_name

aten = torch.ops.aten


def exported(module: nn.Module, *inputs: Any, strict: bool = False) -> GraphModule:
    return torch.export.export(module.eval(), inputs, strict=strict).module(check_guards=False)


def sourced(module: nn.Module, *inputs: Any) -> GraphModule:
    model = exported(module, *inputs)
    with_sources(model)
    return model


def found(model: GraphModule, *wanted: Any) -> list[tuple[str, ...]]:
    """The operators of each partition, in order, parameters by their paths."""
    partitions = get_source_partitions(model.graph, list(wanted)).values()
    return sorted(tuple(str(n.target) for n in p.nodes) for p in chain.from_iterable(partitions))


def described(model: GraphModule, wanted: Any) -> Counter[Any]:
    """All that a partition says, without the order of parameters, which the exporters differ in."""
    return Counter(
        (
            tuple(sorted(str(node.target) for node in partition.nodes)),
            frozenset(str(node.target) for node in partition.params),
            len(partition.input_nodes),
            len(partition.output_nodes),
        )
        for partitions in get_source_partitions(model.graph, [wanted]).values()
        for partition in partitions
    )


def sources_of(strict: GraphModule) -> list[Any]:
    """What strict export names as sources, each once."""
    named = [entry[-1][1] for node in strict.graph.nodes if (entry := node.meta.get(KEY))]
    return [source for index, source in enumerate(named) if source not in named[:index]]


def forms(m: Any, x: Tensor) -> Tensor:
    """The ways to call the same operators."""
    x = m.block(m.act(m.bn(m.conv(x))))
    x = F.conv2d(m.block(x), m.kernel)
    x = F.relu(x) + torch.relu(x - 1) * x.relu() / 2
    x = torch.add(x, x).add(1)
    x += 1
    x = F.max_pool2d(x.add_(1), 2)
    x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
    x = F.linear(m.linear(x), m.matrix) @ m.matrix
    x = torch.cat([x, 1 - x], 1)[:, :4]
    return aten.sigmoid.default(F.softmax(x, -1) + F.gelu(x))


LAYERS = {
    "conv": nn.Conv2d(3, 4, 3), "bn": nn.BatchNorm2d(4), "act": nn.ReLU(),
    "block": nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True)), "linear": nn.Linear(4, 4),
    "kernel": nn.Parameter(randn(4, 4, 1, 1)), "matrix": nn.Parameter(randn(4, 4)),
}  # fmt: skip
FORMS = Model(forms, **LAYERS), randn(1, 3, 10, 10)

MODELS = (
    "resnet18", "mobilenet_v3", "shared_conv", "in_place", "embedding_mlp", "lstm", "gru_cell",
    "encoder_decoder", "attention_torch", "self_concatenation",
)  # fmt: skip
QUICK = ("in_place", "lstm", "attention_torch")


@cache
def strict_forms() -> GraphModule:
    return exported(*FORMS, strict=True)


@cache
def default_forms() -> GraphModule:
    return sourced(*FORMS)


def labelled(source: Any) -> str:
    return source if isinstance(source, str) else f"{source.__module__}.{source.__name__}"


class TestAsStrictExport:
    """The same sources, the same partitions."""

    @pytest.mark.parametrize("name", at_once(MODELS, *QUICK))
    @pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")
    def test_models_of_the_zoo(self, name: str) -> None:
        model = by_name(name)
        strict = exported(model.build(), *model.inputs(), strict=True)
        default = sourced(model.build(), *model.inputs())
        wanted = [source for source in sources_of(strict) if not isinstance(source, str)]
        assert any(isinstance(source, type) for source in wanted)
        for source in wanted:
            assert described(default, source) == described(strict, source), source

    def test_forms(self) -> None:
        """What is asked for by name or operator has more partitions, as the table says; nothing has fewer."""
        strict, default = strict_forms(), default_forms()
        more = {}
        for source in sources_of(strict):
            few, many = described(strict, source), described(default, source)
            assert not few - many, source
            more[labelled(source)] = sorted(
                operators[0] for operators, *_ in (many - few).elements()
            )
        assert {source: extra for source, extra in more.items() if extra} == {
            # The name of a function: however it is called, and in modules too.
            "relu": ["aten.relu.default"] * 3 + ["aten.relu_.default"] * 2,
            "add": ["aten.add.Tensor"] * 3,
            # Python's operators are methods of tensors, and the other way round.
            "add_": ["aten.add_.Tensor"],
            "_operator.add": ["aten.add.Tensor"],
            "_operator.iadd": ["aten.add_.Tensor"],
        }

    def test_a_convolution_pads_itself(self) -> None:
        """Unlike strict export, which makes `pad` a convolution of its own that quantizers fail on."""
        model = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), randn(1, 2, 6, 6)
        assert found(exported(*model, strict=True), nn.Conv2d)[0] == ("aten.pad.default",)
        default = sourced(*model)
        (partition,) = get_source_partitions(default.graph, [nn.Conv2d])[nn.Conv2d]
        assert [node.op for node in partition.input_nodes] == ["placeholder"]
        assert [str(node.target) for node in partition.output_nodes] == ["aten.conv2d.default"]
        assert found(default, "pad") == [("aten.pad.default",)]

    def test_strict_sources_stay(self) -> None:
        strict = strict_forms()
        default = sourced(*FORMS)
        assert any(isinstance(n.meta.get(KEY, [None])[-1], Origin) for n in default.graph.nodes)
        without_sources(default)
        assert not any(KEY in node.meta for node in default.graph.nodes)
        before = {node: node.meta.get(KEY) for node in strict.graph.nodes}
        with_sources(strict)
        assert any(before.values())
        assert all(node.meta.get(KEY) is entry for node, entry in before.items() if entry)
        without_sources(strict)
        assert {node: node.meta.get(KEY) for node in strict.graph.nodes} == before


class Block(nn.Module):
    """A module of the user's, whose own operators are an addition and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x) + x)


@cache
def twice() -> GraphModule:
    return sourced(Model(lambda self, x: self.block(self.block(x)), block=Block()), randn(2, 4))


FIRST = ("aten.linear.default",)
LAST = ("block.linear.weight", "block.linear.bias", *FIRST)
"""Parameters are where they are read last."""
OWN = ("aten.add.Tensor", "aten.relu.default")
ROWS: list[tuple[Any, list[tuple[str, ...]]]] = [
    (nn.Linear, [FIRST, LAST]), (Block, [OWN, OWN]), (f"{Block.__module__}.Block", [OWN, OWN]),
    (operator.add, [("aten.add.Tensor",)] * 2), (F.relu, [("aten.relu.default",)] * 2),
    ("relu", [("aten.relu.default",)] * 2), ("linear", [FIRST, LAST]),
    (aten.relu.default, [("aten.relu.default",)] * 2), (aten.linear.default, [FIRST, LAST]), (torch.relu, []),
    (torch.add, []), (F.linear, []), (nn.ReLU, []), (nn.Module, []), (aten.relu_.default, []),
]  # fmt: skip
"""The rows of the module's table: what is asked for, and the partitions of `twice`."""


def _label(wanted: Any) -> str:
    """A name without an address in it: processes that share the tests must call them the same."""
    return f"{type(wanted).__name__} {getattr(wanted, '__name__', wanted)}"


class TestWhatIsAskedFor:
    """Every form, on one program."""

    @pytest.mark.parametrize(("wanted", "expected"), ROWS, ids=[_label(row[0]) for row in ROWS])
    def test_rows(self, wanted: Any, expected: list[tuple[str, ...]]) -> None:
        assert found(twice(), wanted) == sorted(expected)

    @pytest.mark.parametrize("wanted", [row[0] for row in ROWS if row[1]], ids=_label)
    def test_answers_are_under_what_was_asked_for(self, wanted: Any) -> None:
        """Also where the same program was asked for something else before and is afterwards."""
        model = twice()
        answers = get_source_partitions(model.graph, [nn.ReLU, wanted, F.gelu])
        for other, _ in ROWS:
            get_source_partitions(model.graph, [other])
        assert len(answers[wanted]) == 2
        assert list(answers) == [wanted]
        assert all(partition.source == wanted for partition in answers[wanted])
        assert nn.ReLU not in answers

    def test_several_at_once(self) -> None:
        """An operator is in one partition: of the first that it is."""
        model = default_forms()
        both = get_source_partitions(model.graph, [nn.Conv2d, F.conv2d, nn.ReLU, F.relu])
        assert {source: len(partitions) for source, partitions in both.items()} == {
            nn.Conv2d: 3, F.conv2d: 1, nn.ReLU: 3, F.relu: 1,
        }  # fmt: skip
        assert found(model, "relu", F.relu) == found(model, "relu")

    def test_calls_of_different_functions_stay_apart(self) -> None:
        """Torch counts calls per function, so `torch.add(x, y)` and `x + y` are both the first `add`."""

        model = exported(Call(lambda x: torch.add(x, 1) + x), randn(2))
        assert found(model, "add") == [("aten.add.Tensor", "aten.add.Tensor")]
        with_sources(model)
        assert found(model, "add") == [("aten.add.Tensor",)] * 2


class TestEntries:
    """What is written, where, and what it does to a program."""

    def test_parameters_come_from_where_they_are_read_last(self) -> None:
        for model in (strict_forms(), default_forms()):
            (entry,) = (n.meta[KEY][-1] for n in model.graph.nodes if n.target == "matrix")
            assert entry[1] == operator.matmul
            assert entry[1] != F.linear

    def test_bodies(self) -> None:
        """Export does not record what module an operator of a body is in."""
        program = by_name("cond_conv").export().module(check_guards=False)
        with_sources(program)
        assert [len(found(body, F.conv2d)) for body in list(graphs_in(program))[1:]] == [1, 1]

    def test_operators_that_transforms_made(self) -> None:
        """With another operator's meta, and with none; a second call writes both anew."""
        model = twice.__wrapped__()
        first = next(node for node in model.graph.nodes if node.target is aten.relu.default)
        with model.graph.inserting_after(first):
            copied = model.graph.call_function(aten.gelu.default, (first,))
            bare = model.graph.call_function(aten.add.Tensor, (copied, 1))
        copied.meta = dict(first.meta)
        assert found(model, aten.gelu.default) == []
        with_sources(model)
        assert found(model, aten.gelu.default) == [("aten.gelu.default",)]
        assert found(model, "gelu") == []  # it says that it comes from relu
        for wanted in (operator.add, torch.add, "add", aten.add.Tensor):
            assert bare in {
                node
                for partitions in get_source_partitions(model.graph, [wanted]).values()
                for partition in partitions
                for node in partition.nodes
            }


BINARY = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "lshift", "rshift"),
]
IN_PLACE = [
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"),
    "imatmul",
]
UNARY = ["neg", "pos", "abs", "invert"]
INTEGERS = ["and_", "or_", "xor", "invert", "iand", "ior", "ixor", "lshift", "rshift"]


def test_functions_of_operator() -> None:
    """Each has partitions of its own; the first ones of the binary ones with a number before them too."""
    functions = {name: getattr(operator, name) for name in BINARY + IN_PLACE + UNARY}

    def call(x: Tensor, n: Tensor) -> list[Tensor]:
        results = []
        for name, function in functions.items():
            of = n if name in INTEGERS else x
            results.append(function(of.clone()) if name in UNARY else function(of.clone(), of))
        return results + [functions[name](2, x) for name in BINARY[:7]]

    model = sourced(Call(call), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int32))
    twice = {*BINARY[:7], "matmul", "imatmul"}  # the last two are one operator
    for name, function in functions.items():
        assert len(found(model, function)) == 1 + (name in twice), name

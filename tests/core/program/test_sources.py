# SPDX-License-Identifier: Apache-2.0
"""What operators come from: partitions of programs exported by default beside strictly exported ones."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from functools import cache
from itertools import chain
from typing import Any

import pytest
import qompose
import torch
from qompose.program.aten_operators import KEY, Origin, with_sources, without_sources
from qompose.program.control_flow import graphs_in
from qompose.program.graph import copy_graph_module
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.passes.utils.source_matcher_utils import (
    check_subgraphs_connected,
    get_source_partitions,
)
from torch.nn import functional as F

from tests.core.toy import INT8, annotate, claimed, prepare, randn
from tests.zoo import by_name

aten = torch.ops.aten


def exported(module: nn.Module, *inputs: Any, strict: bool = False) -> GraphModule:
    program = torch.export.export(module.eval(), inputs, strict=strict)
    return program.module(check_guards=False)


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


class Forms(nn.Module):
    """The ways to call the same operators."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(inplace=True))
        self.kernel = nn.Parameter(randn(4, 4, 1, 1))
        self.linear, self.matrix = nn.Linear(4, 4), nn.Parameter(randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.act(self.bn(self.conv(x))))
        x = F.conv2d(self.block(x), self.kernel)
        x = F.relu(x) + torch.relu(x - 1) * x.relu() / 2
        x = torch.add(x, x).add(1)
        x += 1
        x = F.max_pool2d(x.add_(1), 2)
        x = torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)
        x = F.linear(self.linear(x), self.matrix) @ self.matrix
        x = torch.cat([x, 1 - x], 1)[:, :4]
        return aten.sigmoid.default(F.softmax(x, -1) + F.gelu(x))


FORMS = Forms(), randn(1, 3, 10, 10)

MODELS = (
    *("resnet18", "mobilenet_v3", "shared_conv", "in_place", "embedding_mlp", "lstm", "gru_cell"),
    *("encoder_decoder", "attention_torch", "self_concatenation"),
)


@cache
def strict_forms() -> GraphModule:
    return exported(*FORMS, strict=True)


def labelled(source: Any) -> str:
    return source if isinstance(source, str) else f"{source.__module__}.{source.__name__}"


class TestAsStrictExport:
    """The same sources, the same partitions."""

    @pytest.mark.parametrize("name", MODELS)
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
        strict, default = strict_forms(), sourced(*FORMS)
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

    def test_attention_is_one_function_with_moves_around_it(self) -> None:
        model = by_name("attention_torch")
        default = sourced(model.build(), *model.inputs())
        partitions = found(default, nn.MultiheadAttention)
        whole = max(partitions, key=len)
        assert {"aten.softmax.int", "aten.bmm.default"} & {*whole}
        assert len([name for name in whole if name == "aten.linear.default"]) >= 2
        assert all(len(part) == 1 for part in partitions if part is not whole)
        assert len(found(default, aten.linear.default)) == whole.count("aten.linear.default")

    def test_a_convolution_pads_itself(self) -> None:
        """Unlike strict export, which makes `pad` a convolution of its own that quantizers fail on."""
        model = nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), randn(1, 2, 6, 6)
        strict = exported(*model, strict=True)
        assert found(strict, nn.Conv2d)[0] == ("aten.pad.default",)
        default = sourced(*model)
        (partition,) = get_source_partitions(default.graph, [nn.Conv2d])[nn.Conv2d]
        assert [node.op for node in partition.input_nodes] == ["placeholder"]
        assert [str(node.target) for node in partition.output_nodes] == ["aten.conv2d.default"]
        assert found(default, "pad") == [("aten.pad.default",)]

    def test_strict_sources_stay(self) -> None:
        strict = strict_forms()
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


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


FIRST = ("aten.linear.default",)
LAST = (
    "block.linear.weight",
    "block.linear.bias",
    *FIRST,
)  # parameters are where they are read last
OWN = ("aten.add.Tensor", "aten.relu.default")
ROWS: list[tuple[Any, list[tuple[str, ...]]]] = [
    (nn.Linear, [FIRST, LAST]),
    (Block, [OWN, OWN]),
    (f"{Block.__module__}.Block", [OWN, OWN]),
    (operator.add, [("aten.add.Tensor",)] * 2),
    (F.relu, [("aten.relu.default",)] * 2),
    ("relu", [("aten.relu.default",)] * 2),
    ("linear", [FIRST, LAST]),
    (aten.relu.default, [("aten.relu.default",)] * 2),
    (aten.linear.default, [FIRST, LAST]),
    (torch.relu, []),
    (torch.add, []),
    (F.linear, []),
    (nn.ReLU, []),
    (nn.Module, []),
    (aten.relu_.default, []),
]
"""The rows of the module's table: what is asked for, and the partitions of `Twice`."""


def _label(wanted: Any) -> str:
    """A name without an address in it: processes that share the tests must call them the same."""
    return f"{type(wanted).__name__} {getattr(wanted, '__name__', wanted)}"


class TestWhatIsAskedFor:
    """Every form, on one program."""

    @pytest.mark.parametrize(("wanted", "expected"), ROWS, ids=[_label(row[0]) for row in ROWS])
    def test_rows(self, wanted: Any, expected: list[tuple[str, ...]]) -> None:
        assert found(sourced(Twice(), randn(2, 4)), wanted) == sorted(expected)

    @pytest.mark.parametrize("wanted", [row[0] for row in ROWS if row[1]], ids=_label)
    def test_answers_are_under_what_was_asked_for(self, wanted: Any) -> None:
        """Also where the same program was asked for something else before and is afterwards."""
        model = sourced(Twice(), randn(2, 4))
        answers = get_source_partitions(model.graph, [nn.ReLU, wanted, F.gelu])
        for other, _ in ROWS:
            get_source_partitions(model.graph, [other])
        assert len(answers[wanted]) == 2
        assert list(answers) == [wanted]
        assert all(partition.source == wanted for partition in answers[wanted])
        assert nn.ReLU not in answers

    def test_several_at_once(self) -> None:
        """An operator is in one partition: of the first that it is."""
        model = sourced(*FORMS)
        both = get_source_partitions(model.graph, [nn.Conv2d, F.conv2d, nn.ReLU, F.relu])
        assert {source: len(partitions) for source, partitions in both.items()} == {
            nn.Conv2d: 3, F.conv2d: 1, nn.ReLU: 3, F.relu: 1,
        }  # fmt: skip
        assert found(model, "relu", F.relu) == found(model, "relu")

    def test_calls_of_different_functions_stay_apart(self) -> None:
        """Torch counts calls per function, so `torch.add(x, y)` and `x + y` are both the first `add`."""

        class Two(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.add(x, 1) + x

        model = exported(Two(), randn(2))
        assert found(model, "add") == [("aten.add.Tensor", "aten.add.Tensor")]
        with_sources(model)
        assert found(model, "add") == [("aten.add.Tensor",)] * 2

    def test_filters(self) -> None:
        model = sourced(*FORMS)
        none = get_source_partitions(model.graph, [nn.Linear], lambda node: node.op != "get_attr")
        assert none == {nn.Linear: []}

    def test_neighbours_are_connected(self) -> None:
        model = sourced(*FORMS)
        answers = get_source_partitions(model.graph, [nn.Conv2d, nn.BatchNorm2d])
        first, norm = answers[nn.Conv2d][0], answers[nn.BatchNorm2d][0]
        assert check_subgraphs_connected(first, norm)
        assert not check_subgraphs_connected(norm, first)


class TestEntries:
    """What is written, where, and what it does to a program."""

    def test_parameters_come_from_where_they_are_read_last(self) -> None:
        strict, default = strict_forms(), sourced(*FORMS)
        for model in (strict, default):
            (entry,) = (n.meta[KEY][-1] for n in model.graph.nodes if n.target == "matrix")
            assert entry[1] == operator.matmul
            assert entry[1] != F.linear

    def test_bodies(self) -> None:
        """Export does not record what module an operator of a body is in."""
        model = by_name("cond_conv")
        program = model.export().module(check_guards=False)
        with_sources(program)
        bodies = list(graphs_in(program))[1:]
        assert [len(found(body, F.conv2d)) for body in bodies] == [1, 1]

    def test_a_copy_is_written_and_the_original_is_not(self) -> None:
        original = exported(*FORMS)
        with_sources(copy_graph_module(original))
        assert not any(KEY in node.meta for node in original.graph.nodes)

    def test_operators_that_transforms_made(self) -> None:
        """With another operator's meta, and with none; a second call writes both anew."""
        model = sourced(Twice(), randn(2, 4))
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

    def test_removal(self) -> None:
        model = sourced(*FORMS)
        assert any(isinstance(node.meta.get(KEY, [None])[-1], Origin) for node in model.graph.nodes)
        without_sources(model)
        assert not any(KEY in node.meta for node in model.graph.nodes)

    def test_deep_copies_answer_too(self) -> None:
        model = sourced(Twice(), randn(2, 4))
        expected = found(model, nn.Linear)
        for node in model.graph.nodes:
            node.meta.update(copy.deepcopy({k: v for k, v in node.meta.items() if k == KEY}))
        assert found(model, nn.Linear) == expected

    def test_readers_of_the_entry_itself(self) -> None:
        """As (name, source), by index or unpacked; where nothing was asked, grouped as strict export does."""
        model = sourced(Twice(), randn(2, 4))
        linears = [node for node in model.graph.nodes if node.target is aten.linear.default]
        entries = [node.meta[KEY][-1] for node in linears]
        assert [name for name, _ in entries] == [node.name for node in linears]
        assert all(nn.Linear in [source for _, source in node.meta[KEY]] for node in linears)
        assert len({entry[1] for entry in entries}) == 1
        assert len(entries[0]) == 2

    def test_checks_that_export_makes_have_no_function(self) -> None:
        class Cast(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.to(torch.float64).to(torch.float32) * 2

        model = sourced(Cast(), randn(2))
        check = ("aten._assert_tensor_metadata.default",)
        assert found(model, check[0].split(".")[1]) == [check] * 2
        assert found(model, "to") == [("aten.to.dtype",)] * 2


class Sums(qompose.Quantizer):
    """Annotates sums, in the style of the field's tutorial."""

    def annotate(self, model: GraphModule) -> GraphModule:
        found = get_source_partitions(model.graph, [operator.add, torch.add])
        for partition in chain.from_iterable(found.values()):
            node = partition.output_nodes[0]
            annotate(node, dict.fromkeys(node.all_input_nodes, INT8), INT8)
        return model


def test_quantizers_that_ask() -> None:
    """Programs exported by default; the entries are on the snapshot alone, and the program can be saved."""
    program = torch.export.export(Twice().eval(), (randn(2, 4),))
    prepared = prepare(program, Sums())
    assert sorted(claimed(prepared).values()) == [("add",), ("add_1",)]
    assert not any(KEY in node.meta for node in prepared.graph.nodes)
    assert not any(KEY in node.meta for node in program.graph.nodes)

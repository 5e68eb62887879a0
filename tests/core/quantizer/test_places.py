# SPDX-License-Identifier: Apache-2.0
"""Selectors of places: containers, paths between operators, and calls by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from qompose.errors import SelectorError
from torch import Tensor, nn

from tests.core.places import (
    CALLS,
    HELD,
    PROGRAM,
    Caller,
    Regions,
    Scanned,
    X,
    configs,
    rules,
)
from tests.core.toy import (
    DYNAMIC,
    STATIC,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        pytest.param(lambda q: q.set_module_name("blocks", STATIC), [0, 1], id="name"),
        pytest.param(lambda q: q.set_module_name("parts", STATIC), [2], id="dictionary"),
        pytest.param(lambda q: q.set_module_name("parts.an odd name", STATIC), [2], id="odd name"),
        pytest.param(lambda q: q.set_module_name_regex("blocks", STATIC), [0, 1], id="regex"),
        pytest.param(lambda q: q.set_subgraph("blocks", "blocks.1", STATIC), [0, 1], id="subgraph"),
        pytest.param(
            lambda q: q.set_module_name_object_type_order("blocks", nn.Sequential, 1, STATIC),
            [1],
            id="call",
        ),
    ],
)
def test_containers_are_modules(setting: Any, chosen: list[int]) -> None:
    found = list(configs(HELD, setting(rules())).values())
    assert [number for number, config in enumerate(found) if config == "static"] == chosen


class TestSubgraph:
    """`set_subgraph`."""

    @pytest.mark.parametrize(
        ("inputs", "outputs", "chosen"),
        [
            pytest.param("first", "last", {"linear", "linear_1", "linear_2", "add", "linear_3"}, id="all"),
            pytest.param("left", "add", {"linear_1", "add"}, id="one branch"),
            pytest.param("linear_2", "linear_2", {"linear_2"}, id="one operator"),
            pytest.param(["left", "right"], ["add"], {"linear_1", "linear_2", "add"}, id="several"),
        ],
    )  # fmt: skip
    def test_what_lies_between(self, inputs: Any, outputs: Any, chosen: set[str]) -> None:
        quantizer = rules().set_global(STATIC).set_subgraph(inputs, outputs, None)
        found = configs(PROGRAM, quantizer)
        assert {name for name, config in found.items() if config == "float"} == chosen

    @pytest.mark.parametrize(
        ("inputs", "outputs", "message"),
        [
            pytest.param("lefd", "last", "no operator or module 'lefd' .*'left'", id="name"),
            pytest.param(
                "last", "first", "no path leads from last to first", id="against the flow"
            ),
            pytest.param(
                "left", "right", "no path leads from left to right", id="beside each other"
            ),
        ],
    )
    def test_errors(self, inputs: str, outputs: str, message: str) -> None:
        with pytest.raises(SelectorError, match=f"toy: .*{message}"):
            prepare(PROGRAM, rules().set_subgraph(inputs, outputs, None))

    def test_bodies_inside_belong_to_it(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                x = self.a(x)
                with torch.no_grad():
                    x = self.b(x)
                return x.neg()

        program = export(seeded(Net()), X)
        quantizer = rules().set_global(STATIC).set_subgraph("a", "neg", None)
        assert set(configs(program, quantizer).values()) == {"float"}

    def test_a_name_of_an_operator_and_of_a_module_has_to_say_which(self) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.linear = nn.Linear(3, 3), nn.Linear(3, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.linear(self.first(x))

        program = export(seeded(Net()), X)  # operator linear is in first, linear_1 in linear
        with pytest.raises(SelectorError, match=r"both the operator linear .*first.* and a module"):
            prepare(program, rules().set_subgraph("linear", "linear", None))
        for name, chosen in [("operator:linear", "linear"), ("module:linear", "linear_1")]:
            found = configs(program, rules().set_subgraph(name, name, STATIC))
            assert [n for n, config in found.items() if config == "static"] == [chosen]
        with pytest.raises(SelectorError, match="'module:first_'"):
            prepare(program, rules().set_subgraph("module:first_", "linear", None))

    @pytest.mark.parametrize("strict", [False, True])
    @pytest.mark.parametrize(
        ("inputs", "outputs", "chosen"),
        [
            pytest.param("a", "b", {"a", "b"}, id="into a body"),
            pytest.param("c", "d", {"c", "d"}, id="out of a body"),
            pytest.param("b", "c", {"b", "c"}, id="inside"),
            pytest.param("a", "d", {"a", "b", "c", "d"}, id="through"),
        ],
    )
    def test_paths_lead_into_bodies_and_out_of_them(
        self, inputs: str, outputs: str, chosen: set[str], strict: bool
    ) -> None:
        program = export(seeded(Regions()), X, strict=strict)
        plan = plan_of(prepare(program, rules().set_subgraph(inputs, outputs, STATIC)))
        assert {o.module for o in plan.operators if o.claim is not None} == chosen

    def test_paths_lead_through_the_slices_of_a_scan(self) -> None:
        with torch.no_grad():
            program = torch.export.export(seeded(Scanned()), (randn(5, 2, 3),))
        plan = plan_of(prepare(program, rules().set_subgraph("before", "after", STATIC)))
        assert {o.module for o in plan.operators if o.claim is not None} == {
            *("before", "cell", "after")
        }


class TestCall:
    """`set_module_name_object_type_order`."""

    @pytest.mark.parametrize(
        ("module", "kind", "index", "chosen"),
        [
            pytest.param("inner", F.linear, 0, "linear_1", id="the module's own first call"),
            pytest.param("inner", F.linear, 1, "linear_3", id="its second"),
            pytest.param("inner", aten.linear, 1, "linear_3", id="an operator"),
            pytest.param("inner", aten.linear.default, 0, "linear_1", id="an overload"),
            pytest.param("", F.linear, 0, "linear_4", id="the model itself"),
            pytest.param("inner", nn.Linear, 0, "linear", id="a submodule"),
            pytest.param("inner", nn.Linear, 1, "linear_2", id="the same submodule again"),
            pytest.param("inner.fc", F.linear, 1, "linear_2", id="in the submodule"),
        ],
    )
    def test_calls_are_counted_by_module(
        self, module: str, kind: Any, index: int, chosen: str
    ) -> None:
        quantizer = rules().set_global(STATIC)
        quantizer.set_module_name_object_type_order(module, kind, index, DYNAMIC)
        found = configs(CALLS, quantizer)
        assert [name for name, config in found.items() if config == "dynamic"] == [chosen]

    @pytest.mark.parametrize("strict", [False, True])
    def test_calls_in_bodies_count_in_the_order_of_a_run(self, strict: bool) -> None:
        program = export(seeded(Regions()), X, strict=strict)
        for number, module in enumerate("abcd"):
            quantizer = rules().set_module_name_object_type_order("", nn.Linear, number, STATIC)
            plan = plan_of(prepare(program, quantizer))
            assert [o.module for o in plan.operators if o.claim is not None] == [module]

    def test_a_module_call_is_all_that_it_computes(self) -> None:
        quantizer = rules().set_module_name_object_type_order("", Caller.Inner, 0, STATIC)
        found = configs(CALLS, quantizer)
        assert [name for name, config in found.items() if config == "static"] == [
            *("linear", "linear_1", "linear_2", "linear_3")
        ]

    @pytest.mark.parametrize(
        ("module", "kind", "index", "message"),
        [
            pytest.param("iner", F.linear, 0, "'iner'.*did you mean 'inner'", id="module"),
            pytest.param(
                "inner", F.linear, 2, r"2 calls of aten.linear \(linear_1, linear_3\)", id="index"
            ),
            pytest.param("", nn.Linear, 0, "0 calls of torch.nn.*Linear.*none", id="not its own"),
        ],
    )
    def test_what_is_not_there_is_an_error(
        self, module: str, kind: Any, index: int, message: str
    ) -> None:
        quantizer = rules().set_module_name_object_type_order(module, kind, index, None)
        with pytest.raises(SelectorError, match=message):
            prepare(CALLS, quantizer)

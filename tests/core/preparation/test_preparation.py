# SPDX-License-Identifier: Apache-2.0
"""Preparation: one observer per sharing group, the same outputs, the same way to be called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import qompose
import torch
from qompose import RuleQuantizer
from qompose.errors import ConfigError
from qompose.observers import MinMaxObserver
from qompose.program.meta import tag_of
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.core.preparation.test_zoo import of_each_kind
from tests.core.toy import (
    LINEAR,
    Model,
    ToyBackend,
    convert,
    export,
    observers_of,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.zoo import ZooModel, tagged

STATIC_MODELS = tagged(without=("transformers", "mutation", "bn", "control_flow"))


def fork(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.b(y) + m.c(y) + y


FORK = seeded(Model(fork, **{name: nn.Linear(3, 3) for name in "abc"}))


@pytest.mark.parametrize("model", of_each_kind(STATIC_MODELS), ids=str)
def test_outputs_stay_bit_identical(model: ZooModel) -> None:
    """With everything annotated that the toy rules match; the models have no batch norm to fold."""
    program, inputs = model.export(), model.inputs()
    prepared = prepare(program, toy())
    assert plan_of(prepared).rewrites == ()
    with torch.no_grad():
        expected, actual = program.module()(*inputs), prepared(*inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_each_group_has_one_observer_that_all_its_points_run_through() -> None:
    prepared = prepare(export(FORK, randn(2, 3)), toy())
    names = [str(node.target) for node in observers_of(prepared)]
    groups = plan_of(prepared).groups
    assert set(names) == {f"activation_post_process_{i}" for i in range(len(groups))}
    modules = [module for module in prepared.modules() if isinstance(module, MinMaxObserver)]
    assert len(modules) == len(groups)
    observed: dict[str, set[str]] = {name: set() for name in names}
    for node in observers_of(prepared):
        observed[str(node.target)].add(node.args[0].name)  # type: ignore[union-attr]
    for number, group in enumerate(groups):
        sources = {point.source for point in group.points}
        assert observed[f"activation_post_process_{number}"] == sources


def test_regions_are_tagged_with_their_claims() -> None:
    """What later stages read survives in `node.meta["custom"]`."""
    prepared = prepare(export(FORK, randn(2, 3)), toy())
    for number, claim in enumerate(plan_of(prepared).claims):
        for node in prepared.graph.nodes:
            assert (tag_of(node, "claim") == number) is (node.name in claim.nodes)


def test_the_callback_sees_every_place_and_may_replace_observers() -> None:
    class Fixed(MinMaxObserver):
        def calculate_qparams(self) -> tuple[Tensor, Tensor]:
            return torch.tensor(0.5), torch.tensor(3)

    places: list[str] = []

    class Replacing(RuleQuantizer):
        def prepare_obs_or_fq_callback(self, model: GraphModule, edges: Any) -> None:
            places.extend(p.name if isinstance(p, Node) else f"{p[0]}>{p[1]}" for p in edges)
            for place in edges:
                if isinstance(place, Node):
                    edges[place] = Fixed(dtype=torch.int8, quant_min=-128, quant_max=127)

    quantizer = Replacing(ToyBackend([LINEAR])).set_global(ToyBackend().configs["static"])
    x = randn(2, 3)
    program = export(seeded(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))), x)
    converted = convert(program, quantizer, x)
    assert sorted(place.lstrip("_0123456789") for place in places) == [
        "input_1>linear", "linear", "linear>linear_1", "linear_1", "weight>linear", "weight>linear_1",
    ]  # fmt: skip
    arguments = [
        n.args[1:3] for n in converted.graph.nodes if ".quantize_per_tensor" in str(n.target)
    ]
    assert arguments.count((0.5, 3)) == 2, "both outputs, and the edge that shares with one"


@pytest.mark.parametrize(
    "change",
    [
        lambda edges: edges.update(
            {next(p for p in edges if type(p) is tuple)[0]: MinMaxObserver()}
        ),
        lambda edges: edges.popitem(),
        lambda edges: edges.update(dict.fromkeys(edges, nn.Identity())),
        lambda edges: edges.update(dict.fromkeys(edges, MinMaxObserver(dtype=torch.int32))),
    ],
)
def test_a_callback_may_not_add_observers_or_take_others(change: Callable[[Any], None]) -> None:
    class Changing(RuleQuantizer):
        def prepare_obs_or_fq_callback(self, model: GraphModule, edges: Any) -> None:
            change(edges)

    quantizer = Changing(ToyBackend([LINEAR])).set_global(ToyBackend().configs["static"])
    with pytest.raises(ConfigError, match="prepare_obs_or_fq_callback"):
        prepare(export(nn.Linear(3, 4), randn(2, 3)), quantizer)


class Keywords(nn.Linear):
    def forward(  # type: ignore[override]
        self, first: Tensor, *, pair: dict[str, Tensor], scale: Tensor
    ) -> dict[str, Any]:
        apply = super().forward
        return {"sum": apply(first) * scale, "rest": [pair["a"], apply(pair["b"])]}


def test_the_way_to_call_is_kept() -> None:
    x = randn(2, 3)
    arguments = {"pair": {"a": x, "b": x + 1}, "scale": torch.tensor(2.0)}
    model = seeded(Keywords(3, 3))
    program = torch.export.export(model, (x,), arguments)
    expected = model(x, **arguments)
    prepared = prepare(program, toy(LINEAR))
    torch.testing.assert_close(prepared(x, **arguments), expected, rtol=0, atol=0)
    reordered = {"scale": arguments["scale"], "pair": arguments["pair"]}
    torch.testing.assert_close(prepared(x, **reordered), expected, rtol=0, atol=0)
    converted = qompose.convert_pt2e(prepared)
    assert list(converted(x, **arguments)) == ["sum", "rest"]
    lowered = qompose.lower(converted)
    assert len(lowered(x, **arguments)["rest"]) == 2


# torch 2.13 copies the argument tree of any exported module through a class that it deprecates
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_prepared_model_can_be_copied() -> None:
    x = randn(2, 3)
    prepared = prepare(export(FORK, x), toy(LINEAR))
    twin = copy.deepcopy(prepared)
    twin(x)
    with pytest.raises(qompose.errors.UncalibratedError):
        qompose.convert_pt2e(prepared)
    assert torch.equal(qompose.convert_pt2e(twin)(x), convert(export(FORK, x), toy(LINEAR), x)(x))

# SPDX-License-Identifier: Apache-2.0
"""Selectors that leave one operator in float, whatever it is fused with, and leave all others alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import qompose
import torch
from qompose.diagnosis.tuning_result import excluding
from qompose.errors import TuningError
from qompose.quantizer.restriction import Restricted
from qompose.quantizer.rule_quantizer import RuleQuantizer
from qompose.spec.selectors import for_name
from torch import Tensor, nn

from tests.core.diagnosis.test_tuning import PROGRAM, tuned
from tests.core.quantizer.interop.foreign import Foreign
from tests.core.toy import (
    DYNAMIC,
    INT8,
    LINEAR,
    PER_TENSOR,
    RELU,
    RULES,
    STATIC,
    Annotator,
    Model,
    annotate,
    export,
    plan_of,
    prepare,
    randn,
    seeded,
    toy,
)

aten = torch.ops.aten


def fused(m: Any, x: Tensor) -> Tensor:
    """A linear whose relu is a module of its own, one that is called twice, and bare functions."""
    x = m.act(m.one(x))
    x = m.act(m.two(x)) + m.two(x)
    x = nn.functional.linear(x, m.weight)
    x = nn.functional.linear(m.three(x), m.weight)
    return x.sigmoid() + x


LINEARS = {name: nn.Linear(4, 4) for name in ("one", "two", "three")}
WEIGHT = nn.Parameter(torch.empty(4, 4))
FUSED, SMALL = seeded(Model(fused, **LINEARS, act=nn.ReLU(), weight=WEIGHT)), randn(16, 4)


@pytest.mark.parametrize("config", [PER_TENSOR, pytest.param(DYNAMIC, marks=pytest.mark.full)])
def test_selectors_pick_one_operator(config: Any) -> None:
    """Each site of a program in turn: it is in float, and all others are quantized as before."""
    program = export(FUSED, SMALL)
    quantizer = toy(*RULES, RELU, config=config)
    prepared = qompose.calibrate(prepare(program, quantizer), [(SMALL,)])
    base = qompose.sensitivity(prepared, [(SMALL,)])
    for row in base:
        ranking = replace(base, rows=(replace(row, cost=1.0),))  # the others cost nothing
        metric = in_float(*row.operators)
        found = qompose.tune(program, quantizer, [(SMALL,)], metric, 0.5, ranking=ranking)
        assert len(found.attempts) == 2
        (site,) = found.excluded
        assert site.name == row.name
        plan = plan_of(prepare(program, found.quantizer))
        quantized = {o.name for o in plan.operators if o.claim is not None}
        before = {o.name for o in plan_of(prepared).operators if o.claim is not None}
        assert before - quantized == {*row.operators, *site.others}
        # What reads the last linear has float all around it then.
        assert site.others == (
            ("add_1", "sigmoid") if config is PER_TENSOR and row.name == "linear_5" else ()
        )


def test_settings_of_single_calls_are_not_outdone() -> None:
    """A module's name would lose to a call that the user set."""
    quantizer = toy(config=PER_TENSOR).set_module_name_object_type_order(
        "layers.3", aten.linear.default, 0, STATIC
    )
    found = tuned(quantizer=quantizer, drop=0.5, metric=in_float("layers.3", by="module"))
    assert "layers.3" in {site.module for site in found.excluded}
    assert all(setting.level == "call" for setting in found.selectors)


def in_float(*wanted: str, by: str = "name") -> Callable[[Any], float]:
    """A metric that minds only how many of some operators or modules are quantized."""

    def metric(model: Any) -> float:
        record = model.meta.get("qompose")
        operators = () if record is None else record.plan.operators
        taken = {getattr(operator, by) for operator in operators if operator.claim is not None}
        return -float(len(taken.intersection(wanted)))

    return metric


def test_other_members_do_not_take_over() -> None:
    quantizer = qompose.compose(toy(config=PER_TENSOR), toy(LINEAR, config=DYNAMIC, name="other"))
    found = tuned(
        quantizer=quantizer, drop=0.5, metric=in_float("layers.1", "layers.2", by="module")
    )
    assert {site.module for site in found.excluded} == {"layers.1", "layers.2"}
    for member in found.quantizer.members:
        assert {s.label for s in member.selectors.settings} >= {
            "module name layers.1",
            "module name layers.2",
        }


def annotator() -> Annotator:
    """A quantizer that is code: it annotates one linear."""

    def linears(node: Any) -> None:
        if node.target is aten.linear.default and "layers.1" in str(node.meta["nn_module_stack"]):
            annotate(node, {node.args[0]: INT8}, INT8)

    return Annotator(linears)


def test_members_without_selectors_are_not_heard() -> None:
    quantizer = qompose.compose(annotator(), toy(config=PER_TENSOR))
    found = tuned(
        quantizer=quantizer, drop=0.5, metric=in_float("layers.1", "layers.3", by="module")
    )
    assert {site.module for site in found.excluded} == {"layers.1", "layers.3"}
    assert found.written is None
    assert any("annotator is defined in code" in note for note in found.notes)
    for chosen in (
        found.quantizer,
        found.apply(qompose.compose(annotator(), toy(config=PER_TENSOR))),
    ):
        (row,) = qompose.report(prepare(PROGRAM, chosen)).why("layers.1")
        assert str(row).endswith("is float: annotator: left in float by module name layers.1")
    before = qompose.report(prepare(PROGRAM, quantizer))  # which is left as it was
    assert [row.owner for row in before.why("layers.1")] == ["annotator"]


def test_more_settings_for_a_member_that_is_not_heard() -> None:
    first = for_name("layers.1", None)
    once = excluding(annotator(), [first])
    again = excluding(once, [for_name("layers.2", None)])
    assert isinstance(once, Restricted) and isinstance(again, Restricted)
    assert again.excluded == (first, for_name("layers.2", None))
    assert once.excluded == (first,)
    assert excluding(again, []) is again


def test_what_stays_quantized_whatever_is_set_is_named() -> None:
    """A quantizer of rules that does not look at its selectors for one layer."""

    class Stubborn(RuleQuantizer):
        def propose(self, model: Any, taken: Any, on_conflict: str = "error") -> Any:
            free = RuleQuantizer(self.backend).set_global(PER_TENSOR).propose(model, taken)
            found = super().propose(model, taken)
            kept = [claim for claim in found.claims if claim.anchor != "linear_1"]
            kept += [claim for claim in free.claims if claim.anchor == "linear_1"]
            return replace(found, claims=kept)

    metric = in_float("layers.1", "layers.3", by="module")
    with pytest.raises(TuningError) as caught:
        tuned(quantizer=Stubborn(toy().backend).set_global(PER_TENSOR), drop=0.5, metric=metric)
    note = caught.value.tuning.notes[0]
    assert "layers.1) cannot be left in float" in note
    assert "toy" in note


def test_a_member_that_is_not_heard_keeps_all_else() -> None:
    """Each method of the interface is the member's own, but for the claims."""
    asked = []

    class Talkative(Annotator):
        rewrites = ("split_attention",)
        on_conflict = "first"

        def transform_for_annotation(self, model: Any) -> Any:
            asked.append("transform_for_annotation")
            return model

        def validate(self, model: Any) -> None:
            asked.append("validate")

        def prepare_obs_or_fq_callback(self, model: Any, observers: Any) -> None:
            asked.append("prepare_obs_or_fq_callback")

        def check_program(self, exported: Any) -> list[str]:
            asked.append("check_program")
            return ["nothing"]

        def objection_to_rewrite(self, claim: Any, nodes: Any) -> str:
            return "a rewrite"

        def objection_to_spec(self, claim: Any, spec: Any) -> str:
            return "a specification"

        def quantization_capabilities(self) -> Any:
            return "capabilities"

    member: Any = Talkative(lambda node: None)
    held: Any = excluding(member, [for_name("layers.1", None)])
    assert (held.name, held.rewrites, held.on_conflict) == ("annotator", member.rewrites, "first")
    assert held.objection_to_rewrite(None, ()) == "a rewrite"
    assert held.objection_to_spec(None, None) == "a specification"
    assert held.quantization_capabilities() == "capabilities"
    assert "nothing" in qompose.report(prepare(PROGRAM, held)).notes
    assert {*asked} == {
        "transform_for_annotation", "validate", "prepare_obs_or_fq_callback", "check_program",
    }  # fmt: skip
    interface = {name for name, value in vars(qompose.Quantizer).items() if callable(value)}
    own = {name for name in vars(type(held)) if name in interface} - {"__init__"}
    assert interface - own - {"__init__"} <= {"to_dict", "to_json"}  # which say that it is code


def test_quantizers_of_other_packages_are_tuned_too() -> None:
    found = tuned(quantizer=Foreign(), drop=0.5, metric=in_float("layers.1", by="module"))
    (row,) = qompose.report(prepare(PROGRAM, found.apply(Foreign()))).why("layers.1")
    assert "left in float by" in row.reason

# SPDX-License-Identifier: Apache-2.0
"""The plan is data that can be read: the toy quantizer's plans for models of many kinds are on file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion
from torch import nn

from tests.core.toy import LINEAR, VIEW, Model, export, prepare, randn, toy
from tests.zoo import by_name

MODELS = ("conv_bn_relu", "self_concatenation", "cond_shared_weight", "scan_cell")


@pytest.mark.parametrize("name", MODELS)
def test_plans_on_file(name: str, on_file: SnapshotAssertion) -> None:
    prepared = prepare(by_name(name).export(), toy())
    assert prepared.meta["qompose"].plan.to_dict() == on_file


def test_text_has_a_line_for_each_fact() -> None:
    plan = prepare(by_name("conv_bn_relu").export(), toy()).meta["qompose"].plan
    assert {
        "toy, rule conv_relu: conv2d -> relu in 0.0, static",
        "    _0_0_weight -> conv2d: int8 [-127, 127] per_channel_symmetric axis 0, group 0",
        "    output of relu: int8 [-128, 127] per_tensor_affine, group 4",
        "float: flatten (aten.flatten.using_ints in 2.1): no rule claims it",
        "rewritten by fold_batch_norm: conv2d, batch_norm",
        "idle",
    } < {*str(replace(plan, notes=("idle",))).split("\n")}
    moved = Model(lambda m, x: m.linear(x).view(-1, 2), linear=nn.Linear(3, 4))
    shared = prepare(export(moved, randn(6, 3)), toy(LINEAR, VIEW)).meta["qompose"].plan
    assert "    output of view: as linear -> view, group 2" in str(shared).split("\n")

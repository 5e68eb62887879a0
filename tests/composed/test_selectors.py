# SPDX-License-Identifier: Apache-2.0
"""Selectors against every installed backend: which level wins does not depend on whose quantizer it is."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, RuleQuantizer
from torch import Tensor, nn

aten = torch.ops.aten

BACKENDS = [info.name for info in qompose.backends()]


class Block(nn.Module):
    """A lookup, a product and a convolution: something for every backend."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.fc, self.conv = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Conv1d(3, 3, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.conv(self.fc(self.table(ids)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        return self.body[0](ids).sum() + self.body[1](ids).sum()


@cache
def program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(Net().eval(), (torch.tensor([[1, 2, 3]]),))


# The first operator of each kind, and what picks it and nothing of its kind in the second block.
PARTS: dict[str, tuple[type[nn.Module], Any, str]] = {
    "table": (nn.Embedding, torch.nn.functional.embedding, "embedding"),
    "fc": (nn.Linear, torch.nn.functional.linear, "linear"),
    "conv": (nn.Conv1d, torch.nn.functional.conv1d, "conv1d"),
}


@cache
def part_of(backend: str) -> str:
    """The first part of a block that a backend takes."""
    taken = configs(quantizer(backend).set_global(named(backend, "any")))
    return next(part for part in PARTS if taken[f"body.0.{part}"] == "any")


def named(backend: str, name: str) -> QuantizationConfig:
    config = qompose.backend.load_backend(backend).default_config
    assert config is not None
    return dataclasses.replace(config, name=name)


def quantizer(backend: str) -> RuleQuantizer:
    return RuleQuantizer(qompose.backend.load_backend(backend))


def configs(quantizer: RuleQuantizer) -> dict[str, str]:
    """Module path -> the configuration of the claim there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)  # some settings leave all in float
        rows = qompose.report(qompose.prepare_pt2e(program(), quantizer)).rows
    return {row.module: row.config or "float" for row in rows if row.module}


Setting = Callable[[RuleQuantizer, str, QuantizationConfig | None], Any]
# Least specific first; each speaks of one part of body.0.
LEVELS: dict[str, Setting] = {
    "global": lambda q, part, c: q.set_global(c),
    "operator type": lambda q, part, c: q.set_operator_type(PARTS[part][1], c),
    "regex": lambda q, part, c: q.set_module_name_regex(rf"body\.\d\.{part}", c),
    "filter": lambda q, part, c: q.set_filter(lambda node: node.name == PARTS[part][2], c),
    "name": lambda q, part, c: q.set_module_name(f"body.0.{part}", c),
    "subgraph": lambda q, part, c: q.set_subgraph(f"body.0.{part}", "body.0", c),
    "call": lambda q, part, c: q.set_module_name_object_type_order("body.0", PARTS[part][0], 0, c),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", ["float", "higher"])
@pytest.mark.parametrize(("lower", "higher"), list(itertools.combinations(LEVELS, 2)))
def test_the_more_specific_level_wins(lower: str, higher: str, value: str, backend: str) -> None:
    part, made = part_of(backend), quantizer(backend)
    config = None if value == "float" else named(backend, value)
    for level, given in [
        (higher, config),
        (lower, named(backend, "lower")),
    ]:  # the order of calls is no matter
        LEVELS[level](made, part, given)
    assert configs(made)[f"body.0.{part}"] == value


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_level_reaches_what_it_names(level: str, backend: str) -> None:
    part, made = part_of(backend), quantizer(backend).set_global(None)
    if level != "global":
        LEVELS[level](made, part, named(backend, "given"))
        found = configs(made)
        everywhere = level in ("operator type", "regex")
        assert found[f"body.0.{part}"] == "given"
        assert found[f"body.1.{part}"] == ("given" if everywhere else "float")
    else:
        assert set(configs(made).values()) == {"float"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_module_types(backend: str) -> None:
    part = part_of(backend)
    made = quantizer(backend).set_module_type(PARTS[part][0], named(backend, "given"))
    found = configs(made)
    assert {path for path, config in found.items() if config == "given"} == {
        *(f"body.{number}.{part}" for number in (0, 1))
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_settings_survive_json(backend: str) -> None:
    part, made = part_of(backend), quantizer(backend)
    for level, setting in LEVELS.items():
        if level != "filter":  # code
            setting(made, part, named(backend, level))
    again: Any = qompose.quantizer.quantizer_from_json(made.to_json())
    assert again.selectors == made.selectors
    assert configs(again) == configs(made)

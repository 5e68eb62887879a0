# SPDX-License-Identifier: Apache-2.0
"""Members that ask where operators come from annotate what they do on strictly exported programs.

Many of these quantizers look at operators in another way; to them sources make no difference.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qompose.program.aten_operators import with_sources
from torch.fx import GraphModule

from tests.interop.peers import (
    THEIR_WARNINGS,
    X86InductorQuantizer,
    by_qompose,
    executorch_xnnpack,
    get_default_x86_inductor_quantization_config,
    torchao_x86,
)
from tests.sampling import at_once
from tests.zoo import by_name

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from executorch.backends.cadence.aot.quantizer.quantizer import CadenceDefaultQuantizer

pytestmark = pytest.mark.filterwarnings(
    *THEIR_WARNINGS, "ignore:The tensor attributes .*_flat_weights"
)


MEMBERS: dict[str, Callable[[], Any]] = {
    "x86": torchao_x86,
    "x86 in training": lambda: X86InductorQuantizer().set_global(
        get_default_x86_inductor_quantization_config(is_qat=True)
    ),
    "xnnpack": executorch_xnnpack,
    "cadence": CadenceDefaultQuantizer,
}
Annotations = dict[str, tuple[dict[str, str], str]]


def exported(name: str, *, strict: bool = False, sources: bool = False) -> GraphModule:
    model = by_name(name)
    program = torch.export.export(model.build(), model.inputs(), strict=strict)
    found = program.module(check_guards=False)
    if sources:
        with_sources(found)
    return found


def annotated(member: str, model: GraphModule) -> Annotations:
    """Kinds of specifications by node, without annotations that only say that a parameter is taken."""
    MEMBERS[member]().annotate(model)
    found = {}
    for node in model.graph.nodes:
        annotation = node.meta.get("quantization_annotation")
        if annotation is not None and node.op != "get_attr":
            inputs = {n.name: type(s).__name__ for n, s in annotation.input_qspec_map.items()}
            found[node.name] = inputs, type(annotation.output_qspec).__name__
    return found


ALIKE = [
    *(("x86", name) for name in ("mobilenet_v2", "mlp", "encoder_decoder", "gru")),
    *(("x86 in training", name) for name in ("mobilenet_v2", "mlp")),
    *(("xnnpack", name) for name in ("mobilenet_v2", "mlp", "encoder_decoder", "gru")),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("member", "name"), at_once(ALIKE, ("x86", "encoder_decoder"), ("xnnpack", "mlp"))
)
def test_sources_change_nothing_that_was_found(member: str, name: str) -> None:
    """A model of modules alone, exported by default: the same with sources and without."""
    with_them = annotated(member, exported(name, sources=True))
    assert with_them == annotated(member, exported(name))
    assert with_them


MORE = [
    ("x86", "weight_in_buffer", {"conv2d_1", "linear"}),  # functions: F.conv2d, F.linear
    ("xnnpack", "mobilenet_v3", {"adaptive_avg_pool2d"}),
    ("cadence", "lenet", {"conv2d", "linear"}),
]
"""Member, model, and operators that it finds only where there are sources."""


@pytest.mark.parametrize(("member", "name", "operators"), at_once(MORE, MORE[0]))
def test_what_was_missed(member: str, name: str, operators: set[str]) -> None:
    """As on a strictly exported program."""
    with_them = annotated(member, exported(name, sources=True))
    assert with_them == annotated(member, exported(name, strict=True))
    assert not operators & {*annotated(member, exported(name))}
    assert operators <= {*with_them}


@pytest.mark.parametrize("member", at_once(("x86", "x86 in training"), "x86"))
@pytest.mark.parametrize("name", at_once(("shared_conv", "retina_head"), "shared_conv"))
def test_a_module_that_runs_twice(member: str, name: str) -> None:
    """Without sources, torch takes both runs for one, and the member gives up."""
    with_them = annotated(member, exported(name, sources=True))
    assert with_them == annotated(member, exported(name, strict=True))
    with pytest.raises(ValueError):
        annotated(member, exported(name))


def test_what_a_member_made_has_no_sources_afterwards() -> None:
    """Its transform copies meta to the operators that it makes; export cannot write these entries."""
    model = by_name("scalars")
    converted = by_qompose(model.export(), executorch_xnnpack(), model.inputs()).model
    assert any(node.target is torch.ops.aten.mul.Tensor for node in converted.graph.nodes)
    assert not any("source_fn_stack" in node.meta for node in converted.graph.nodes)
    torch.export.save(torch.export.export(converted, model.inputs()), io.BytesIO())

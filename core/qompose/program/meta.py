# SPDX-License-Identifier: Apache-2.0
"""Every key that qompose writes to `node.meta` or `module.meta`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import Node

STAGE_KEY = "qompose"
"""Key of the record in the `meta` of every GraphModule that qompose makes."""
CUSTOM_KEY = "qompose"
"""Key inside `node.meta["custom"]`, the one part of a node's meta that torch.export.save keeps."""


def tag(node: Node, **facts: object) -> None:
    """Record facts under the key of `node.meta` that survives torch.export.save."""
    custom = dict(node.meta.get("custom") or {})
    custom[CUSTOM_KEY] = {**custom.get(CUSTOM_KEY, {}), **facts}
    node.meta["custom"] = custom


def tag_of(node: Node, fact: str) -> Any:
    """Return a fact that `tag` recorded, None where there is none."""
    custom = node.meta.get("custom") or {}
    return custom.get(CUSTOM_KEY, {}).get(fact)


CLAIM_TAG, OPERATOR_TAG = "claim", "operator"
"""Facts that tell what a node of a lowered graph comes from: the number of its claim, and the name of its
operator in the exported program."""


def claim_of(node: Node) -> int | None:
    """Return the number of the claim that a node of a lowered graph belongs to, or None if it has none.

    The number survives another `torch.export.export` and the passes behind it.
    """
    claim: int | None = tag_of(node, CLAIM_TAG)
    return claim


def operator_of(node: Node) -> str | None:
    """Return the name of the operator, in the exported program, that a node of a lowered graph comes from.

    None if the node was inserted for no operator. The name survives another `torch.export.export`.
    """
    operator: str | None = tag_of(node, OPERATOR_TAG)
    return operator


def clear_origin(node: Node) -> None:
    """Let a node belong to no claim and come from no operator, as for a step that a kernel inserts."""
    custom = {k: v for k, v in (node.meta.pop("custom", None) or {}).items() if k != CUSTOM_KEY}
    if custom:
        node.meta["custom"] = custom


def untag(node: Node, fact: str) -> None:
    """Remove a fact that `tag` recorded, if there is one."""
    custom = dict(node.meta.get("custom") or {})
    facts = {name: value for name, value in custom.pop(CUSTOM_KEY, {}).items() if name != fact}
    if facts:
        custom[CUSTOM_KEY] = facts
    if custom:
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)


VALUE_TAG, INTEGERS_TAG, FACTORS_TAG = "value", "integers", "factors"
"""Facts that tell which values of the exported program a node gives (`plan.operator_ids.identify`), and
as which integers where it gives those: scale, zero point, least and largest; and by which factors it is off
the value itself where channels are balanced, each with its dimension or the shape that they have together."""
PARAMETER = "parameter"
"""How the ids of parameters end, where those of computed values have operator and port."""
_OF_VALUES = (VALUE_TAG, INTEGERS_TAG, FACTORS_TAG)


def values_of(node: Node) -> list[str]:
    """Return the ids of the values that a node gives: several where it stands for what passes them on."""
    found: list[str] = tag_of(node, VALUE_TAG) or []
    return found


def hand_over(old: Node, new: Node, grid: tuple[Any, ...] | None = None) -> None:
    """Let a node in the place of another say that it gives the same values.

    Args:
        grid: scale, zero point, least and largest of the integers, if it gives those.
    """
    values = values_of(old)
    give_source(old, new)
    if values:
        tag(new, **{VALUE_TAG: [*(v for v in values_of(new) if v not in values), *values]})
        if (factors := tag_of(old, FACTORS_TAG)) is not None:
            tag(new, **{FACTORS_TAG: factors})
        if grid is not None:
            scale, zero_point, *bounds = grid
            tag(new, **{INTEGERS_TAG: [float(scale), int(zero_point), *bounds]})


def provenance_of(node: Node) -> dict[str, Any]:
    """Return the part of a node's meta for nodes that are made for it; they give other values."""
    meta = {key: node.meta[key] for key in PROVENANCE if key in node.meta and key != SOURCE_KEY}
    others = {k: v for k, v in (meta.pop("custom", None) or {}).items() if k != HANDLE_KEY}
    own = {k: v for k, v in others.pop(CUSTOM_KEY, {}).items() if k not in _OF_VALUES}
    custom = {**others, CUSTOM_KEY: own} if own else others
    return {**meta, "custom": custom} if custom else meta


def give_source(old: Node, new: Node) -> None:
    """Let numeric debuggers compare a node with the operator whose value it gives, as `old` does."""
    if SOURCE_KEY in old.meta:
        new.meta[SOURCE_KEY] = old.meta[SOURCE_KEY]
    handle = (old.meta.get("custom") or {}).get(HANDLE_KEY)
    if handle is not None:
        new.meta["custom"] = {**(new.meta.get("custom") or {}), HANDLE_KEY: handle}


def mark(node: Node, entries: Mapping[str, Any]) -> None:
    """Add entries to a node's meta; those under "custom" beside what is there."""
    custom = {**(node.meta.get("custom") or {}), **(entries.get("custom") or {})}
    node.meta.update(entries)
    if custom:
        node.meta["custom"] = custom


PROVENANCE = (
    "nn_module_stack",
    "stack_trace",
    "source_fn_stack",
    "torch_fn",
    "from_node",
    "custom",
)


EXPERT_TAG = "expert"
"""Fact that tells which of the experts of a mixture a product is of: its number, from 0 on."""

SOURCE_KEY, HANDLE_KEY = "from_node", "numeric_debug_handle"
"""By which numeric debuggers pair nodes of two programs: torch's own key, and torchao's inside "custom"."""


QUANTIZATION_TAG = "quantization_tag"
"""Key under which quantizers of this field note on an operator which of their partitions it is in."""


LEARNED_KEY = "qompose_learned"
"""Key in the `meta` of a prepared program: what algorithms learned of it."""


BEGAN_KEY = "qompose_began"
"""Key in the `meta` of a prepared program: what its buffers held when a calibration with `resume` began."""


RAN_KEY = "qompose_ran"
"""Key in the `meta` of a body that ran: the observers inside one that did not saw nothing."""


ANNOTATION_KEY = "quantization_annotation"
"""Key of a node's QuantizationAnnotation in `node.meta`."""


OBSERVER_PREFIX = "activation_post_process_"
GROUP_TAG = "group"
"""Fact of the nodes that call observers: the number of the group."""


META_KEY = STAGE_KEY


REGION_TAG = "region"
"""Fact of the operators of a converted region, by which another preparation knows the claim on it again."""


CAST_TAG, KERNELS_TAG = "cast", "kernels"
"""Facts of nodes: one converts a float type for a specification; one stands for these claims' regions."""


def stand_for(node: Node, replaced: Node) -> None:
    """Let a node stand for the regions that another stood for, which it replaces, beside its own."""
    numbers = [*(tag_of(node, KERNELS_TAG) or ()), *(tag_of(replaced, KERNELS_TAG) or ())]
    if numbers:
        tag(node, **{KERNELS_TAG: numbers})


NAME_TAG = "name"
"""Fact of nodes while a quantizer rewrites their program: what they are called."""


MODE_KEY = "qompose_mode"
"""Where an operator notes what it does in training: its name changes when bodies are told apart."""


MADE = "qompose_made_by_kernel"
"""Key in the meta of the calls that kernels insert: their example values have the exported layout."""

# SPDX-License-Identifier: Apache-2.0
"""What code of a quantizer changed in a program that it may look at, and in observers that it is shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import UserError
from qompose.graph import CUSTOM_KEY, address_of
from qompose.nested import nodes_in
from qompose.observing import fixed_parameters
from qompose.specs import EdgeOrNode

_FACTS = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "eps")
"""What of an observer follows from its specification, and decides the integers."""


@contextmanager
def overseen(
    who: str, model: GraphModule, observers: Mapping[EdgeOrNode, nn.Module]
) -> Iterator[None]:
    """Check that a `prepare_obs_or_fq_callback` does no more than to look, and to put other observers in.

    The program and the observers are those in use, of all members: what is done to them counts for all.
    What numbers a tensor holds is not compared, but whether torch counted a write to it.

    Raises:
        UserError: the block changed the program, its tensors, or what an observer's specification says.
    """
    program, tensors = program_of(model), _tensors(model)
    facts = {observer: (place, _facts(observer)) for place, observer in observers.items()}
    yield
    changes = [*_changes_of_program(program, program_of(model))]
    now = _tensors(model)
    odd = [n for n in dict.fromkeys((*tensors, *now)) if not _same(tensors.get(n), now.get(n))]
    if odd:
        changes.append(f"the tensors {', '.join(odd)}")
    for observer, (place, before) in facts.items():
        names = _differing(before, _facts(observer))
        if names:
            changes.append(f"{', '.join(names)} of the observer of {_described(place)}")
    if changes:
        raise UserError(
            f"{who}: prepare_obs_or_fq_callback changed {'; '.join(changes)}. It may look, and put other "
            "observers into the dictionary that it is given; transform_for_annotation is for changes of the "
            "program, and annotate for specifications."
        )


class _Node(NamedTuple):
    """What a node does, as values that compare, and its meta."""

    call: tuple[object, ...]
    used: bool
    meta: dict[str, Any]


def program_of(model: GraphModule) -> dict[str, _Node]:
    """Return the nodes of a program and of its bodies by name, in order, as values that stay as they are."""
    return {
        node.name: _Node(
            (node.op, node.target, str(node.args), str(node.kwargs)),
            bool(node.users),
            dict(node.meta),
        )
        for node in nodes_in(model)
    }


def edited(before: Mapping[str, _Node], after: Mapping[str, _Node]) -> list[str]:
    """Return the nodes that are new, do something else, or are gone though something read them."""
    gone = [name for name, node in before.items() if name not in after and node.used]
    known = {name: node.call for name, node in before.items()}
    return [*gone, *(name for name, node in after.items() if known.get(name) != node.call)]


def _changes_of_program(before: Mapping[str, _Node], after: Mapping[str, _Node]) -> Iterator[str]:
    names = dict.fromkeys((*edited(before, after), *(n for n in before if n not in after)))
    if names:
        yield f"the program at {', '.join(names)}"
    elif list(before) != list(after):
        yield "the order of the program"
    meta = {
        name: [key for key in node.meta if not _same_entry(key, node.meta, after[name].meta)]
        for name, node in before.items()
        if name in after
    }
    if any(meta.values()):
        keys = dict.fromkeys(chain.from_iterable(meta.values()))
        yield f"meta ({', '.join(keys)}) of {', '.join(name for name in meta if meta[name])}"


def _same_entry(key: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Tell whether an entry of a node's meta stayed; to "custom" members may add."""
    if key == "custom":
        return (before[key] or {}).get(CUSTOM_KEY) == (after.get(key) or {}).get(CUSTOM_KEY)
    return key in after and after[key] is before[key]


class _Tensor(NamedTuple):
    tensor: Tensor
    address: int
    shape: tuple[int, ...]
    version: int


def _tensors(model: GraphModule) -> dict[str, _Tensor]:
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {
        name: _Tensor(
            tensor,
            address_of(tensor) if tensor.layout is torch.strided else 0,
            tuple(tensor.shape),
            0 if tensor.is_inference() else tensor._version,
        )
        for name, tensor in named
    }


def _same(before: _Tensor | None, after: _Tensor | None) -> bool:
    if before is None or after is None:
        return False
    return before.tensor is after.tensor and before[1:] == after[1:]


def _facts(observer: nn.Module) -> list[tuple[str, object]]:
    """Return the facts of an observer and of those inside it, as values that compare."""
    found: list[tuple[str, object]] = []
    for part in observer.modules():
        for name in _FACTS:
            found.append((name, _plain(getattr(part, name, None))))
        found += [
            ("fixed scale and zero point", _plain(value)) for value in fixed_parameters(part) or ()
        ]
    return found


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _differing(before: list[tuple[str, object]], after: list[tuple[str, object]]) -> list[str]:
    if len(before) != len(after):
        return ["the parts"]
    pairs = zip(before, after, strict=True)
    return list(dict.fromkeys(name for (name, was), (_, now) in pairs if was != now))


def _described(place: EdgeOrNode) -> str:
    if isinstance(place, Node):
        return f"the output of {place.name}"
    source, user = place
    return f"{source.name} -> {user.name}"

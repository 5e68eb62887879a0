# SPDX-License-Identifier: Apache-2.0
"""The methods of one program: models that have names, and share parameters and state by path.

A decoder is exported twice, for a prompt and for one token, and both methods write to one cache.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qompose.errors import QomposeError, UserError
from qompose.program.aliasing import written_buffers
from qompose.program.control_flow import nodes_in
from qompose.program.graph import address_of, copies_of, layout_of, set_attribute
from qompose.program.meta import META_KEY, VALUE_TAG, tag_of

ONLY = ""
"""The name of a model that stands alone, where those of several methods have names."""

Model = TypeVar("Model")
State = Mapping[str, Tensor]
"""The exported values of the buffers that a model writes to, by path."""


def by_method(model: Any, function: str) -> Mapping[str, Any]:
    """Return models by the names of their methods; a model that is no mapping is the only one.

    Raises:
        UserError: a mapping is empty or has names that methods cannot have.
    """
    if not isinstance(model, Mapping):
        return {ONLY: model}
    check_methods(model, function)
    return model


def check_methods(methods: Mapping[str, Any], function: str) -> None:
    """Raise UserError unless models have names that a program's methods can have."""
    wrong = [name for name in methods if not (isinstance(name, str) and name.isidentifier())]
    if wrong or not methods:
        raise UserError(
            f"{function} expects a model, or a mapping from method names to models: "
            + (f"{wrong[0]!r} is not an identifier" if wrong else "the mapping is empty")
        )


@contextmanager
def in_method(name: str) -> Iterator[None]:
    """Prefix qompose's own errors with the name of a method, if the model is one of several."""
    try:
        yield
    except QomposeError as error:
        if name != ONLY:
            error.args = (f"method {name!r}: {error}",)
        raise


def each_method(
    models: Mapping[str, Model], function: str, stage: Callable[[Model], GraphModule]
) -> dict[str, GraphModule]:
    """Return what a stage makes of each model; errors name the method, and `function` is the caller's.

    What the models write to is shared.
    """
    check_methods(models, function)
    done = {}
    for name, model in models.items():
        with in_method(name):
            done[name] = stage(model)
    for name, state in share_state(done, states_of(done)).items():
        meta = done[name].meta
        meta[META_KEY] = replace(meta[META_KEY], state=state)
    return done


def states_of(models: Mapping[str, GraphModule]) -> dict[str, State]:
    """Return by method the exported values of the buffers that it writes to, as its record has them."""
    return {name: model.meta[META_KEY].state for name, model in models.items()}


def share_state(models: Mapping[str, GraphModule], states: Mapping[str, State]) -> dict[str, State]:
    """Let buffers of one path that a model writes to be one tensor in all models, in place.

    It has its exported values, in a copy of the models' own.

    Args:
        models: the methods of one program.
        states: by method, the exported values of the buffers that it writes to.

    Returns:
        what `states` was, with one tensor for each path, and with what a method reads that another writes to.

    Raises:
        UserError: a buffer that one method writes to has another shape, type or initial value in another
            method, or became a quantized constant there; or it has no name (`check_named`).
    """
    check_named(models, states)
    held = {name: _tensors(model) for name, model in models.items()}
    state: dict[str, Tensor] = {}
    for method, own in states.items():
        state |= {path: value for path, value in own.items() if path not in state}
        _check_not_folded(own, method, models, held)
    for method, tensors in held.items():
        initial = {**tensors, **states[method]}
        for path in state.keys() & tensors.keys():
            _check_same(path, state[path], initial[path], method, states)
    shared = copies_of(state)
    for method, model in models.items():
        for path in shared.keys() & held[method].keys():
            set_attribute(model, path, shared[path])
    return {
        name: {path: state[path] for path in state if path in own or path in held[name]}
        for name, own in states.items()
    }


_NUMBERED = re.compile(r"(.*\.)?lifted_tensor_\d+")
"""What torch.export calls tensors that are in no module, in the order in which it meets them."""


def check_named(models: Mapping[str, GraphModule], states: Mapping[str, State]) -> None:
    """Raise UserError where a number stands for what is written to, and for another tensor in each method.

    It is the same tensor if it has a name besides, in every method that has the number.
    """
    found: dict[str, list[frozenset[str]]] = defaultdict(list)
    for method, model in models.items():
        tensors, names = {**_tensors(model), **states[method]}, defaultdict[Any, set[str]](set)
        for path, value in tensors.items():
            if not _NUMBERED.fullmatch(path):
                names[layout_of(value)].add(path)
        for path in filter(_NUMBERED.fullmatch, tensors):
            found[path].append(frozenset(names[layout_of(tensors[path])]))
    written = {path for own in states.values() for path in own}
    for path in sorted(written & found.keys()):
        first, *others = found[path]
        if others and (not first or {first} != {*others}):
            raise UserError(
                f"methods share by name the buffers they write to, but {path!r} is a number that "
                "torch.export gives to a tensor that is in no module, in each method anew. Register "
                "it as a buffer (register_buffer) and use it by that attribute, not through a list or "
                "another object, and export all methods again"
            )


def state_with(
    model: GraphModule, state: State, taken: Collection[str]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the exported values of the buffers that a model writes to, now that kernels took over some.

    Args:
        state: as it was before.
        taken: paths of the buffers in whose place the model writes to others, which have their first values.

    Returns:
        by path, the values; and a line for the report if there are any such buffers.
    """
    held = _tensors(model)
    new = copies_of({p: held[p] for p in sorted(written_buffers(model.graph) - state.keys())})
    gone = {address_of(state[path]) for path in taken}
    kept = {p: v for p, v in state.items() if p in held or address_of(v) not in gone}
    if not taken:
        return {**kept, **new}, ()
    before = sum(state[path].nbytes for path in taken)
    after = sum(value.nbytes for value in new.values())
    # A buffer may have several names, of which exporters make up some.
    names = {address_of(v): p for p, v in sorted(state.items(), key=lambda item: -len(item[0]))}
    named = ", ".join(sorted(names[address_of(state[path])] for path in taken))
    rounded = ", with rounded initial values" if any(bool(state[p].any()) for p in taken) else ""
    return {**kept, **new}, (
        f"state kept as integers, {after:,} bytes instead of {before:,}{rounded}: {named}",
    )


def check_taken(models: Mapping[str, GraphModule], taken: Mapping[str, Collection[str]]) -> None:
    """Raise UserError where kernels of one method took over a buffer that another method has.

    Args:
        taken: by method, the paths of such buffers.
    """
    for method, paths in taken.items():
        for other, model in models.items():
            both = sorted({*paths} & _tensors(model).keys())
            if both:
                raise UserError(
                    f"method {method!r} keeps the buffer {both[0]!r} as integers, but method "
                    f"{other!r} has it in float, so they cannot share it. Quantize what writes to it "
                    "in both or in neither; the report says why a method leaves it in float"
                )


def share_constants(
    models: Mapping[str, GraphModule], states: Mapping[str, State]
) -> tuple[str, ...]:
    """Let equal constants of one path be one tensor in all models, in place.

    Args:
        models: the methods of one program, converted or lowered: what they have but state is constant.
        states: by method, the exported values of the buffers that it writes to.

    Returns:
        the paths of weights that have other values in one method than in another, so that each has its own.
    """
    state = {path for own in states.values() for path in own}
    first: dict[str, Tensor] = {}
    differing: dict[str, None] = {}
    for model in models.values():
        for path, own in _tensors(model).items():
            other = first.setdefault(path, own)
            if path in state or other is own or type(own) not in (Tensor, nn.Parameter):
                continue
            facts = [(t.shape, t.dtype, t.device, t.stride(), type(t)) for t in (own, other)]
            if facts[0] == facts[1] and _equal(own, other):
                set_attribute(model, path, other)
            elif own.dim() > 1:
                differing[path] = None
    return tuple(differing)


def _tensors(model: GraphModule) -> dict[str, Tensor]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


def _check_not_folded(
    state: State,
    writer: str,
    models: Mapping[str, GraphModule],
    held: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Raise UserError for a method that has what another writes to as a quantized constant."""
    for method, model in models.items():
        constants = {
            name.partition(":")[0]
            for node in nodes_in(model)
            for name in tag_of(node, VALUE_TAG) or ()
        }
        for path in state:
            if path in constants and path not in held[method]:
                raise UserError(
                    f"method {method!r} quantizes the buffer {path!r} as a constant, but "
                    f"method {writer!r} writes to it. Call set_module_name(..., None) for the "
                    f"module of {method!r} that reads the buffer, to leave that module in float"
                )


def _check_same(
    path: str, first: Tensor, own: Tensor, method: str, states: Mapping[str, State]
) -> None:
    """Raise UserError where a method's buffer is not the one that the others share."""
    other = next(name for name, state in states.items() if path in state)
    problem = ""
    for fact in ("shape", "dtype", "device"):
        if getattr(own, fact) != getattr(first, fact):
            problem = (
                f"{fact} {getattr(own, fact)} in {method!r} and {getattr(first, fact)} in {other!r}"
            )
            break
    else:
        if not _equal(own, first):
            problem = f"different initial values in {method!r} and {other!r}"
    if problem:
        raise UserError(
            f"methods share by name the buffers they write to, but {path!r} has {problem}. "
            "Export all methods from one module before running any of them, or give the "
            "buffers different names"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors have the same bits, NaN included; those without data are never equal."""
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    same = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    if same and one.storage_offset() == other.storage_offset() and one.stride() == other.stride():
        return True
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain if plain.is_complex() else plain.view(torch.uint8)

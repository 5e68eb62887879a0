# SPDX-License-Identifier: Apache-2.0
"""Calls of compiled code, which asks nothing of its inputs and reads memory as the examples lay in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._subclasses.fake_tensor import is_fake
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qompose.errors import InputError
from qompose.program.aliasing import inputs_written
from qompose.program.batches import input_check
from qompose.program.graph import value_of


def called_as_exported(
    run: Callable[..., Any],
    graph: GraphModule,
    returned: pytree.TreeSpec | None,
    *,
    twice: bool = True,
) -> Callable[..., Any]:
    """Return what checks the inputs of a call, and runs what was compiled of a program.

    Compiled code is for the contiguous inputs of `call_signature`, and reads others as if they were
    contiguous. So others are copied. Those on another device, and stand-ins without memory, are refused.

    Args:
        run: the compiled code. It takes the values of placeholders, and returns those of the output node.
        returned: what the program makes of those; None if it returns them as they are.
        twice: whether the code knows that one tensor may be given twice, and written to.
    """
    check: Any = input_check(graph).forward  # a module's own call takes as long again
    written = inputs_written(graph.graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    names = [str(node.target) for node in placeholders]
    examples = enumerate(map(value_of, placeholders))
    devices = [(place, it.device) for place, it in examples if isinstance(it, Tensor)]

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled(_AUTOCAST):  # kernels would return other types than code reads
            with torch.autocast(_AUTOCAST, enabled=False):
                return call(*args, **kwargs)
        values = check(*args, **kwargs)
        wrapping = peek_interpreter_stack() is not None
        for place, device in devices:
            value = values[place]
            if wrapping or value.device != device or type(value) not in _PLAIN:
                _check_place(names[place], value, device)
        if written:
            _check_apart(values, written, names, twice)
            found = _copied_back(run, values, written)
        else:
            found = run(*map(contiguous, values))
        return found if returned is None else pytree.tree_unflatten(found, returned)

    return call


_AUTOCAST: Final = "cpu"
_PLAIN: Final = frozenset({Tensor, nn.Parameter})


def _check_place(name: str, value: Tensor, device: torch.device) -> None:
    """Refuse a tensor whose elements are not in memory where compiled code reads them.

    Raises:
        InputError: it is on another device, or a stand-in: for export, or within `torch.func` and `vmap`.
    """
    if value.device != device:
        remedy = f"Pass {name}.to({str(device)!r})"
        raise InputError(name, f"on {value.device}", f"inputs on {device}", remedy)
    stand_ins: tuple[Callable[..., bool], ...] = (
        is_fake,
        is_functorch_wrapped_tensor,
        is_traceable_wrapper_subclass,
    )
    if any(is_one(value) for is_one in stand_ins):
        raise InputError(
            name,
            f"a {type(value).__name__} without memory of its own",
            "tensors with values",
            "Use the lowered model uncompiled to trace or transform it",
        )


def _copied_back(run: Callable[..., Any], values: Sequence[Any], written: Sequence[int]) -> Any:
    """Run what writes to the inputs of some places, which get it back where it ran on copies.

    Others must not: they may be expanded.
    """
    copies = [*map(_copying(), values)]
    found = run(*copies)
    for place in written:
        if values[place].data_ptr() != copies[place].data_ptr():
            values[place].detach().copy_(copies[place])
    return found


def _check_apart(
    values: Sequence[Any], written: Sequence[int], names: Sequence[str], twice: bool
) -> None:
    """Refuse inputs that share elements with one that is written, as far as their code does not know it.

    Raises:
        InputError: another input is in the memory of one that is written; the code would read its old value.
    """
    tensors = [(place, value) for place, value in enumerate(values) if isinstance(value, Tensor)]
    for place in written:
        value = values[place]
        if _repeats(value):
            _refuse(names[place], "has several elements in one place")
        for other, it in tensors:
            known = other == place or (twice and _view(it) == _view(value))
            if not known and _share_elements(value, it):
                _refuse(names[place], f"shares memory with input {names[other]}")


def _refuse(name: str, why: str) -> NoReturn:
    given, remedy = f"written to and {why}", "Pass a copy, or call the lowered model uncompiled"
    raise InputError(name, given, "inputs that do not overlap", remedy)


def _repeats(value: Tensor) -> bool:
    """Tell whether elements of a tensor are in one place; mostly its strides tell that they are not."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride <= reach:
            return len(set(_places(value).tolist())) < value.numel()
        reach += (size - 1) * stride
    return False


def _share_elements(one: Tensor, other: Tensor) -> bool:
    (start, end), (second, last) = _extent(one), _extent(other)
    if end <= second or last <= start:
        return False
    places = (_places(x) * x.element_size() + x.data_ptr() for x in (one, other))
    return bool(torch.isin(*places).any())


def _extent(value: Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor lies."""
    start = value.data_ptr()
    return start, start + (_reach(value) * value.element_size() if value.numel() else 0)


def _reach(value: Tensor) -> int:
    steps = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)


def _places(value: Tensor) -> Tensor:
    """Return where in its memory each element of a tensor is, counted in elements from its first."""
    return torch.arange(max(_reach(value), 0)).as_strided(value.shape, value.stride()).flatten()


def _view(value: Tensor) -> tuple[object, ...]:
    signs = value.is_neg(), value.is_conj()
    return value.data_ptr(), value.dtype, value.shape, value.stride(), signs


def _copying() -> Callable[[Any], Any]:
    """Return `contiguous`, which gives one tensor for what is given twice, as it may be written to."""
    copies: dict[tuple[object, ...], Tensor] = {}

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        view = _view(x)
        if view not in copies:
            copies[view] = contiguous(x)
        return copies[view]

    return copied


def contiguous(value: Any) -> Any:
    """Return a value, contiguous if it is a tensor, and no view that only notes the sign of its elements.

    Strides of dimensions of one element, which torch.compile compares too, are the usual ones.
    """
    if not isinstance(value, Tensor):
        return value
    if value.stride() == _usual(value.shape) and not (value.is_neg() or value.is_conj()):
        return value
    dense = value.resolve_conj().resolve_neg().contiguous()
    if 1 not in dense.shape:
        return dense
    return dense if dense.stride() == _usual(dense.shape) else dense.view(-1).view(dense.shape)


@lru_cache(maxsize=256)
def _usual(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]

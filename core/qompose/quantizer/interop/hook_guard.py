# SPDX-License-Identifier: Apache-2.0
"""What a quantizer's hook may not change: who did is named, with what was changed."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qompose.errors import UserError, blaming
from qompose.observers.make_observer import fixed_parameters
from qompose.program.changes import calls_of, changes
from qompose.program.control_flow import nodes_in
from qompose.program.graph import constant_of, owner_of, set_attribute
from qompose.spec.quantization_spec import EdgeOrNode

_FACTS = ("dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "eps")
"""What of an observer follows from its specification, and decides the integers."""


@contextmanager
def restore_process() -> Iterator[None]:
    """Put back torch's random numbers, default dtype and grad mode after code of another package."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how often torch counted a write to each tensor."""
    return {name: 0 if t.is_inference() else t._version for name, t in tensors.items()}


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum of the numbers in each tensor.

    It tells what counts do not: some quantizers write what stands there already, others past torch.
    """
    return {name: _checksum(tensor) for name, tensor in tensors.items()}


def _checksum(tensor: Tensor) -> int:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return 0 if tensor.is_inference() else tensor._version
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


State = Callable[[Mapping[str, Tensor]], Mapping[str, int]]


class HookGuard:
    """Watches the hooks of a quantizer, which are called one after the other on one program.

    Args:
        who: what messages call the quantizer.
        buffers: whether they are shared; a copy of a program may have its own (`own_buffers`).
        state: by what a write shows.
    """

    def __init__(
        self, who: str, model: GraphModule, *, buffers: bool = True, state: State = versions
    ) -> None:
        self.who, self.model, self._state = who, model, state
        self._tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        if buffers:
            self._tensors |= dict(model.named_buffers(remove_duplicate=False))
        self._before = state(self._tensors)

    @contextmanager
    def forbid_writes(self, hook: str) -> Iterator[None]:
        """Check that a hook writes to no parameter, and no buffer, which are those of the user's model.

        Raises:
            UserError: it did. What stood there is lost.
        """
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # the quantizer's; what it wrote before matters more
            raised = error
        before, self._before = self._before, self._state(self._tensors)
        written = [name for name in before if self._before[name] != before[name]]
        if written:
            raise UserError(
                f"{self.who}: {hook} modified tensors of the model in place: "
                f"{', '.join(written)}. Their original values are lost; load the model again. "
                "A quantizer may only add new tensors, and only in "
                f"transform_for_annotation{f'. {hook} then failed: {raised}' if raised else ''}"
            ) from raised
        if raised is not None:
            raise raised

    @contextmanager
    def forbid_changes(self, hook: str) -> Iterator[None]:
        """Check that a hook changes no operator of the program, and writes to none of its tensors.

        What nothing reads may go.

        Raises:
            UserError: it did.
            MemberError: it raised an error of its own.
        """
        before = calls_of(self.model)
        with self.forbid_writes(hook), blaming(f"{self.who}: {hook}"):
            yield
        after = calls_of(self.model)
        found = changes(before, after)
        names = [name for name in found.names if name in after or before[name].live]
        if names:
            raise UserError(
                f"{self.who}: {hook} modified the program at {', '.join(names)}. Only "
                "transform_for_annotation may modify the program."
            )


def own_buffers(model: GraphModule) -> None:
    """Give a copy of a program its own buffers and constants, in place, which are small as a rule."""
    copies: dict[int, Tensor] = {}
    for node in nodes_in(model):
        value = constant_of(node)
        own = any(value is copied for copied in copies.values())
        if value is not None and not own and not isinstance(value, nn.Parameter):
            copied = copies.setdefault(id(value), value.clone())
            set_attribute(owner_of(node), str(node.target), copied)


@contextmanager
def forbid_observer_edits(
    who: str, model: GraphModule, observers: Mapping[EdgeOrNode, nn.Module]
) -> Iterator[None]:
    """Check that a `prepare_obs_or_fq_callback` edits no observer: it may put others into the dictionary.

    Raises:
        UserError: something of an observer differs that follows from its specification; or as
            `HookGuard.forbid_changes`.
        MemberError: it raised an error of its own.
    """
    facts = {observer: (place, _facts(observer)) for place, observer in observers.items()}
    with HookGuard(who, model).forbid_changes("prepare_obs_or_fq_callback"):
        yield
    found = []
    for observer, (place, before) in facts.items():
        after = _facts(observer)
        names = [
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ]
        if names:
            found.append(f"{', '.join(sorted(names))} of the observer of {_described(place)}")
    if found:
        raise UserError(
            f"{who}: prepare_obs_or_fq_callback changed {'; '.join(found)}. It may only "
            "replace observers in the dictionary it is given; change specifications in annotate."
        )


def _facts(observer: nn.Module) -> dict[str, object]:
    """Return the facts of an observer and of those inside it, as values that compare."""
    parts = list(observer.modules())
    found: dict[str, object] = {
        name: [_plain(getattr(part, name, None)) for part in parts] for name in _FACTS
    }
    fixed = [_plain(value) for part in parts for value in fixed_parameters(part) or ()]
    return {**found, "fixed scale and zero point": fixed}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value


def _described(place: EdgeOrNode) -> str:
    if isinstance(place, Node):
        return f"the output of {place.name}"
    source, user = place
    return f"{source.name} -> {user.name}"

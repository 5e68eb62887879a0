# SPDX-License-Identifier: Apache-2.0
"""What stands between a tensor and the observer of another engine: no NaN and no mask value comes to it.

The observer stays what it is, the very module that the program calls, because other packages' code looks
for it there. So it is not wrapped: its `forward` is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qompose.errors import MemberError, blaming
from qompose.numerics import PER_CHANNEL
from qompose.screening import Screen


class Guard:
    """The forward of an observer of another engine, with what it must not see kept from it.

    Args:
        observer: the observer, whose own forward is called.
        subject: which tensor is observed, for messages.

    Attributes:
        screen: what was seen of mask values.
    """

    def __init__(self, observer: nn.Module, subject: str) -> None:
        self.forward, self.subject = observer.forward, subject
        self.kind = type(observer).__name__
        self.screen = Screen()
        inner = getattr(observer, "activation_post_process", observer)  # of a fake-quantizer
        axis = getattr(inner, "ch_axis", None)
        per_channel = getattr(inner, "qscheme", None) in PER_CHANNEL
        self._axis = axis if per_channel and isinstance(axis, int) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Observe `x`, and return what the observer makes of it: as a rule `x` itself.

        Raises:
            CalibrationError: there is a NaN.
            MemberError: the observer raised an error, or returned no tensor of the shape of `x`.
        """
        if not x.numel():
            return x
        screened = self.screen.clean(x.detach(), self.subject).values
        seen = screened if self.screen.masked else x
        with blaming(f"{self.kind}, which observes {self.subject},"):
            result = self.forward(self._presented(seen))
        if not isinstance(result, Tensor) or result.numel() != x.numel():
            raise MemberError(
                f"{self.kind}, which observes {self.subject}, returned {_described(result)} for a tensor "
                f"of shape {tuple(x.shape)}; an observer returns what goes on in its place"
            )
        if self.screen.masked:  # the claim will be dropped: the model goes on with its own values
            return x
        return result if result.shape == x.shape else result.reshape(x.shape)

    def _presented(self, x: Tensor) -> Tensor:
        """Give a vector of channels, such as a bias, a second dimension: torch's observers want one."""
        if self._axis is None or x.dim() != 1:
            return x
        return x.unsqueeze(0 if self._axis < 0 else 1)


def guard(observer: nn.Module, subject: str) -> nn.Module:
    """Put a guard before an observer's forward, in place, if it has none, and return the observer."""
    if guard_of(observer) is None:
        observer.forward = Guard(observer, subject)
    return observer


def guard_of(observer: object) -> Guard | None:
    """Return the guard before an observer's forward, None where there is none."""
    found = vars(observer).get("forward") if isinstance(observer, nn.Module) else None
    return found if isinstance(found, Guard) else None


def _described(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return f"{type(result).__name__} {result!r}" if result is not None else "None"

# SPDX-License-Identifier: Apache-2.0
"""Bounds on scale and zero point: what a kernel asks of parameters, whenever they are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a kernel takes of one tensor's parameters, by the names of PyTorch's BackendConfig.

    Scales are compared as the float32 numbers that kernels get. None allows anything.
    """

    scale_min_lower_bound: float | None = None
    scale_max_upper_bound: float | None = None
    scale_exact_match: float | None = None
    zero_point_exact_match: int | None = None

    @property
    def lowest(self) -> Bounds:
        """Return the bound on the least scale alone: what can be checked where data decides on the rest."""
        return Bounds(scale_min_lower_bound=self.scale_min_lower_bound)

    def objections(self, scale: Any, zero_point: Any) -> list[str]:
        """Return what is wrong with parameters, with the value and the bound that it breaks.

        Args:
            scale, zero_point: numbers, or tensors of any shape.
        """
        scales, zero_points = _float32(scale), torch.as_tensor(zero_point)
        least, most, exact = map(
            _limit, (self.scale_min_lower_bound, self.scale_max_upper_bound, self.scale_exact_match)
        )
        found = []
        if least is not None and bool((scales < least).any()):
            found.append(
                self._broken("scale_min_lower_bound", f"the scale {float(scales.min()):g}")
            )
        if most is not None and bool((scales > most).any()):
            found.append(
                self._broken("scale_max_upper_bound", f"the scale {float(scales.max()):g}")
            )
        if exact is not None and bool((scales != exact).any()):
            found.append(self._broken("scale_exact_match", f"the scale {_listed(scales)}"))
        wanted = self.zero_point_exact_match
        if wanted is not None and bool((zero_points != wanted).any()):
            value = f"the zero point {_listed(zero_points)}"
            found.append(self._broken("zero_point_exact_match", value))
        return found

    def _broken(self, name: str, value: str) -> str:
        words = {
            "scale_min_lower_bound": "below the bound",
            "scale_max_upper_bound": "above the bound",
        }
        how = words.get(name, "and the kernel takes exactly")
        return f"{value}, {how} {getattr(self, name):g} ({name})"


def _float32(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().to(torch.float32)


def _limit(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float32)


def _listed(values: Tensor) -> str:
    distinct = sorted({float(value) for value in values.flatten()})
    shown = ", ".join(f"{value:g}" for value in distinct[:3])
    return f"{shown}, ..." if len(distinct) > 3 else shown

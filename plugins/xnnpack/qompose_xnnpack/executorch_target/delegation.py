# SPDX-License-Identifier: Apache-2.0
"""What became of the operators of a program: delegated to XNNPACK, or left to portable kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator of the lowered program.

    ``name``: such as ``aten.linear.default``; ``claim``: id of the claim it came from, if any;
    ``int8``: whether it computes on int8 tensors (a delegate also runs float operators); ``module``:
    path of the module that it comes from, if known; ``source``: name of the operator of the exported
    program that it is or is a part of, if known; ``reason``: why XNNPACK did not take it, "" if it did.
    """

    name: str
    claim: int | None
    int8: bool
    module: str = ""
    source: str = ""
    reason: str = ""

    @property
    def place(self) -> str:
        """Return the operator's name with its module, where that is known."""
        return f"{self.name} in {self.module}" if self.module else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Stray:
    """A quantize or dequantize operator that runs outside every delegate without need.

    It is needed at a boundary of the int8 part: next to an input, an output or a constant of the program
    or a portable operator, looking through other conversions outside delegates. So one between two
    delegates is stray. A quantize operator that only dequantize operators outside read just rounds, as
    nothing computes on its integers: that pair is stray wherever it is. A delegate without an operator,
    made of conversions alone, counts as outside.

    ``name``: such as ``quantized_decomposed.quantize_per_tensor.default``; ``reads``, ``readers``: names
    of the nodes around it; ``reason``: why it is where it is, in the partitioner's words, if it gave one.
    """

    name: str
    module: str
    reads: str
    readers: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.name}{where}, from {self.reads} to {', '.join(self.readers)}{why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Delegation:
    """Which operators XNNPACK took; quantize, dequantize and bookkeeping nodes are not operators.

    ``delegates``: one tuple of operators for each XNNPACK delegate, in graph order; it is empty where a
    delegate only quantizes or dequantizes. ``portable``: operators left to ExecuTorch's portable kernels,
    each with the reason. ``strays``: needless conversions beside the delegates.
    """

    delegates: tuple[tuple[Operator, ...], ...]
    portable: tuple[Operator, ...]
    strays: tuple[Stray, ...] = ()

    @property
    def operators(self) -> tuple[Operator, ...]:
        """All operators, those in delegates first."""
        return (*(op for delegate in self.delegates for op in delegate), *self.portable)

    @property
    def delegated_claims(self) -> frozenset[int]:
        """Claims with operators in a delegate and none outside."""
        return _claims(op for part in self.delegates for op in part) - _claims(self.portable)

    @property
    def int8_claims(self) -> frozenset[int]:
        """Claims all of whose operators compute on int8 tensors, in a delegate or outside."""
        return _claims(self.operators) - _claims(op for op in self.operators if not op.int8)

    @property
    def in_float(self) -> tuple[str, ...]:
        """Operators that do not compute on int8 tensors, with their modules where these are known."""
        return tuple(op.place for op in self.operators if not op.int8)

    @property
    def whole(self) -> bool:
        """Whether the quantized part is whole: no strays, and every claimed operator computes on int8.

        An int8 kernel of another plugin, such as one that looks words up in a table, need not be in a
        delegate for that, and may have operators beside it, such as a check of indices.
        """
        on_int8 = {(op.claim, op.source) for op in self.operators if op.int8}
        claimed = {(op.claim, op.source) for op in self.operators if op.claim is not None}
        return not self.strays and claimed <= on_int8

    def remarks(self) -> dict[str, str]:
        """Return what operators of the exported program became, by name; of those that are known."""
        taken: dict[str, list[Operator]] = {}
        left: dict[str, list[Operator]] = {}
        for operator in self.operators:
            side = left if operator.reason else taken
            if operator.source:
                side.setdefault(operator.source, []).append(operator)
        return {
            source: _remark(taken.get(source, []), left.get(source, []))
            for source in dict.fromkeys((*taken, *left))
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the same as data for JSON."""
        return {
            "delegates": [[asdict(op) for op in delegate] for delegate in self.delegates],
            "portable": [asdict(op) for op in self.portable],
            "strays": [asdict(stray) for stray in self.strays],
            "delegated_claims": sorted(self.delegated_claims),
            "int8_claims": sorted(self.int8_claims),
            "whole": self.whole,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Delegation:
        """Return what ``to_dict`` turned into data."""
        strays = ({**stray, "readers": tuple(stray["readers"])} for stray in data["strays"])
        return cls(
            delegates=tuple(tuple(Operator(**op) for op in part) for part in data["delegates"]),
            portable=tuple(Operator(**op) for op in data["portable"]),
            strays=tuple(Stray(**stray) for stray in strays),
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        every, number = self.operators, len(self.delegates)
        int8 = sum(op.int8 for op in every)
        yield (
            f"{number} XNNPACK delegate{'s' * (number != 1)}, {len(every)} operators: {int8} in int8, "
            f"{len(every) - int8} in float; {len(self.portable)} with portable kernels; "
            f"{len(self.strays)} stray quantize or dequantize operators"
        )
        for place, delegate in enumerate(self.delegates):
            counts = Counter(f"{op.name} ({'int8' if op.int8 else 'float'})" for op in delegate)
            listed = (f"{n} x {name}" if n > 1 else name for name, n in counts.items())
            yield f"delegate {place}: {', '.join(listed) or 'only quantizes or dequantizes'}"
        yield from (f"portable: {op.place}: {op.reason}" for op in self.portable)
        yield from (f"stray: {stray}" for stray in self.strays)


def _claims(operators: Iterable[Operator]) -> frozenset[int]:
    return frozenset(op.claim for op in operators if op.claim is not None)


def _remark(taken: list[Operator], left: list[Operator]) -> str:
    """Describe what an operator became that is made of operators in delegates and of portable ones."""
    parts = []
    if taken:
        kind = "int8" if all(op.int8 for op in taken) else "float"
        parts.append(f"{kind} in delegate (XNNPACK)")
    if left:
        kind = "int8" if all(op.int8 for op in left) else "float"
        names = {op.reason: [o.name for o in left if o.reason == op.reason] for op in left}
        phrases = (f"{', '.join(dict.fromkeys(group))}: {why}" for why, group in names.items())
        parts.append(f"{kind}, ExecuTorch's portable kernel: {'; '.join(phrases)}")
    return " and partly ".join(parts)

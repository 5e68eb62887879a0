# SPDX-License-Identifier: Apache-2.0
"""What `supports` is asked about: a rule by its name or drawing, or operators and modules in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import nn

from qompose.backend.pattern import OperatorPattern, Pattern
from qompose.backend.rule import Rule, naming
from qompose.errors import ConfigError, SelectorError, near_names
from qompose.program.batch_norm_folding import FOLDABLE
from qompose.spec.selectors import kind_of, names_of

_BATCH_NORM = "aten.batch_norm"
_OF_MODULES: dict[str, str] = {
    "Linear": "linear", "Bilinear": "bilinear", "Embedding": "embedding",
    "Conv1d": "conv1d", "Conv2d": "conv2d", "Conv3d": "conv3d",
    "ConvTranspose1d": "conv_transpose1d", "ConvTranspose2d": "conv_transpose2d",
    "ConvTranspose3d": "conv_transpose3d",
    "BatchNorm1d": "batch_norm", "BatchNorm2d": "batch_norm", "BatchNorm3d": "batch_norm",
    "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "RMSNorm": "rms_norm",
    "InstanceNorm1d": "instance_norm", "InstanceNorm2d": "instance_norm",
    "InstanceNorm3d": "instance_norm",
    "ReLU": "relu", "ReLU6": "hardtanh", "Hardtanh": "hardtanh", "Hardswish": "hardswish",
    "Hardsigmoid": "hardsigmoid", "SiLU": "silu", "GELU": "gelu", "Sigmoid": "sigmoid",
    "Tanh": "tanh", "ELU": "elu", "CELU": "celu", "SELU": "selu", "LeakyReLU": "leaky_relu",
    "PReLU": "prelu", "Mish": "mish", "Softplus": "softplus", "Softmax": "softmax",
    "LogSoftmax": "log_softmax", "LogSigmoid": "log_sigmoid", "GLU": "glu",
    "Threshold": "threshold", "Softshrink": "softshrink", "Hardshrink": "hardshrink",
    "MaxPool1d": "max_pool1d", "MaxPool2d": "max_pool2d", "MaxPool3d": "max_pool3d",
    "AvgPool1d": "avg_pool1d", "AvgPool2d": "avg_pool2d", "AvgPool3d": "avg_pool3d",
    "AdaptiveAvgPool1d": "adaptive_avg_pool1d", "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
    "AdaptiveAvgPool3d": "adaptive_avg_pool3d", "Dropout": "dropout",
    "Flatten": "flatten", "Unflatten": "unflatten", "PixelShuffle": "pixel_shuffle",
    "PixelUnshuffle": "pixel_unshuffle", "ChannelShuffle": "channel_shuffle",
    "ZeroPad2d": "pad", "ConstantPad2d": "pad", "ReflectionPad2d": "pad",
    "ReplicationPad2d": "pad", "UpsamplingNearest2d": "upsample_nearest2d",
    "UpsamplingBilinear2d": "upsample_bilinear2d", "Unfold": "im2col", "Fold": "col2im",
    "EmbeddingBag": "embedding_bag", "LSTM": "lstm", "GRU": "gru", "RNN": "rnn_tanh",
    "LSTMCell": "lstm_cell", "GRUCell": "gru_cell", "RNNCell": "rnn_tanh_cell",
    "AdaptiveMaxPool1d": "adaptive_max_pool1d", "AdaptiveMaxPool2d": "adaptive_max_pool2d",
    "AdaptiveMaxPool3d": "adaptive_max_pool3d", "Softmax2d": "softmax",
    "ConstantPad1d": "pad", "ConstantPad3d": "pad", "ZeroPad1d": "pad", "ZeroPad3d": "pad",
    "ReflectionPad1d": "pad", "ReflectionPad3d": "pad", "ReplicationPad1d": "pad",
    "ReplicationPad3d": "pad", "CircularPad1d": "pad", "CircularPad2d": "pad",
    "CircularPad3d": "pad",
}  # fmt: skip
_OTHERS = {"aten.rnn_tanh": {"aten.rnn_relu"}, "aten.rnn_tanh_cell": {"aten.rnn_relu_cell"}}
"""What a module may be exported as, too, by its arguments."""
MODULES: dict[type[nn.Module], str] = {
    getattr(nn, module): f"aten.{operator}" for module, operator in _OF_MODULES.items()
}
"""The modules of torch.nn that are exported as one operator, and which."""


@dataclass(frozen=True)
class Part:
    """One operator of a question: the names it may have, with overloads or without, and what it is called.

    A batch norm that is a module type has `after`: the operators whose results have its dimensions.
    """

    operators: frozenset[str]
    label: str
    after: frozenset[str] | None = None

    def is_one_of(self, operators: Iterable[str]) -> bool:
        """Return whether any of some operators (names without overloads) is meant."""
        return not self.operators.isdisjoint(operators)

    def folds_into(self, earlier: Part | None) -> bool:
        """Return whether this is a batch norm that can be folded into the operator before it."""
        if earlier is None or not self.is_one_of((_BATCH_NORM,)):
            return False
        return earlier.is_one_of(_FOLDABLE if self.after is None else self.after & _FOLDABLE)

    def takes(self, target: str) -> bool:
        """Return whether an operator of a pattern, `aten.relu.default`, is meant."""
        return self.is_one_of(names_of(target))


@dataclass(frozen=True)
class Question:
    """What `supports` is asked about: a rule by its name or drawing, or operators in their order."""

    text: str
    parts: tuple[Part, ...] = ()

    @property
    def label(self) -> str:
        """Return the question in one line."""
        return " -> ".join(part.label for part in self.parts) or repr(self.text)

    def is_about(self, rule: Rule) -> bool:
        """Return whether a rule is meant: by its name, its drawing, or the operators of a variant."""
        if self.text and self.text in (rule.name, rule.drawing):
            return True
        return any(map(self._are, sequences(rule, self._may_call)))

    def _are(self, calls: Sequence[str]) -> bool:
        return len(calls) == len(self.parts) and all(map(Part.takes, self.parts, calls))

    def _may_call(self, pattern: Pattern | OperatorPattern) -> bool:
        """Tell from the operators that a pattern names whether it may be meant: to capture it takes long."""
        named = (
            [] if isinstance(pattern, OperatorPattern) else [str(t) for _, t in pattern.operators]
        )
        return all(any(part.takes(target) for part in self.parts) for target in named)

    def without_batch_norm(self) -> Question:
        """Return the question as it is once batch norms are folded into the operators before them.

        One that follows another batch norm stays: there is nothing left that it could be folded into.
        """
        before = (None, *self.parts)
        kept = [
            part
            for part, earlier in zip(self.parts, before, strict=False)
            if not part.folds_into(earlier)
        ]
        return Question(self.text, tuple(kept))


_FOLDABLE = frozenset(str(target.overloadpacket) for target in FOLDABLE)
_AFTER: dict[type[nn.Module], frozenset[str]] = {
    norm: frozenset(f"aten.{name}" for name in (f"conv{n}d", f"conv_transpose{n}d", *others))
    for n, norm, others in (
        (1, nn.BatchNorm1d, ("linear",)),
        (2, nn.BatchNorm2d, ()),
        (3, nn.BatchNorm3d, ()),
    )
}
"""By type of batch norm: the operators that give what it takes."""


def question_of(pattern: object) -> Question:
    """Return what is asked about: see `Capabilities.supports`.

    Raises:
        SelectorError: a module or function that is more than one operator, or none that is known.
        ConfigError: `pattern` is nothing that one can ask about.
    """
    if isinstance(pattern, str):
        text = " ".join(pattern.split())
        names = [name.strip() for name in text.split("->")]
        if not all(names):
            raise ConfigError(f"expected a pattern such as 'conv2d -> relu', got {pattern!r}")
        return Question(text, tuple(map(_by_name, names)))
    items: Sequence[Any] = pattern if isinstance(pattern, (tuple, list)) else (pattern,)
    if not items:
        raise ConfigError("pattern must not be empty")
    return Question("", tuple(map(_part, items)))


def _part(item: object) -> Part:
    if isinstance(item, str):
        return _by_name(item)
    if isinstance(item, type) and issubclass(item, nn.Module):
        if item not in MODULES:
            raise SelectorError(
                f"{item.__qualname__} is not a torch.nn module that exports to a single "
                f"operator{near_names(item.__qualname__, _OF_MODULES)}. Ask about the operators "
                "it calls, or use qompose.can_quantize for those of an exported program"
            )
        names = _with_in_place(MODULES[item]) | _OTHERS.get(MODULES[item], set())
        return Part(names, item.__qualname__, _AFTER.get(item))
    if isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return Part(frozenset({str(item)}), str(item))
    if not callable(item) or isinstance(item, type):
        raise ConfigError(
            "pattern must be the name or drawing of a rule, or a torch operator, function or "
            f"module type, got {item!r}"
        )
    return Part(kind_of(item).operators, getattr(item, "__name__", str(item)))


def is_operator(name: str) -> bool:
    """Tell whether a name is that of an aten operator, or of a module that is exported as one."""
    return name.removeprefix("nn.") in _OF_MODULES or hasattr(
        torch.ops.aten, name.removeprefix("aten.").partition(".")[0]
    )


def _by_name(name: str) -> Part:
    module = name.removeprefix("nn.")
    if module in _OF_MODULES:
        return _part(getattr(nn, module))
    base = name.removeprefix("aten.")
    if base == name and "." in name:
        return Part(frozenset({name}), name)  # an operator of another library
    return Part(_with_in_place(f"aten.{base}"), name)


def _with_in_place(operator: str) -> frozenset[str]:
    return frozenset({operator, f"{operator}_"})


def sequences(
    rule: Rule, asked: Callable[[Pattern | OperatorPattern], bool] | None = None
) -> tuple[tuple[str, ...], ...]:
    """Return the operators that a rule's patterns call, in their order, for each variant.

    Args:
        asked: which patterns count; None: all.
    """
    with naming(rule):
        patterns = [p for p in rule.patterns if asked is None or asked(p)]
        found = [calls for pattern in patterns for calls in _calls(pattern)]
    return tuple(dict.fromkeys(tuple(map(str, calls)) for calls in found))


class Variants(Sequence[tuple[str, ...]]):
    """The `sequences` of a rule, as a tuple would hold them, found when one first looks at them.

    Patterns are captured for it, which takes seconds for a large table; most who ask what a backend can do
    read no operators.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    @cached_property
    def _found(self) -> tuple[tuple[str, ...], ...]:
        return sequences(self._rule)

    @overload
    def __getitem__(self, index: int) -> tuple[str, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[str, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Variants):
            return self._rule is other._rule or self._found == other._found
        return self._found == other

    def __hash__(self) -> int:
        return hash(self._found)

    def __repr__(self) -> str:
        return repr(self._found)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how a copy is made: as a tuple, since rules hold functions that cannot be pickled."""
        return tuple, (self._found,)


def _calls(pattern: Pattern | OperatorPattern) -> Sequence[Sequence[object]]:
    if isinstance(pattern, OperatorPattern):
        return [(target,) for target in pattern.targets]
    return [pattern.calls()]


_MOST = 3
"""How many rules a reason names for each operator."""


def what_is_missing(question: Question, tables: Iterable[tuple[str, Sequence[Rule]]]) -> str:
    """Say why no rule answers a question: which of its operators have rules, and which have none."""
    tables = list(tables)
    if question.text and len(question.parts) == 1 and not is_operator(question.text):
        known = sorted({rule.name for _, rules in tables for rule in rules})
        return (
            f"no backend has a rule {question.text!r}{near_names(question.text, known)}. Known: "
            f"{', '.join(known) or 'none'}"
        )
    found = {part.label: _rules_with(part, tables) for part in question.parts}
    without = [label for label, rules in found.items() if not rules]
    several = len(question.parts) > 1
    reasons = [f"no rule matches {question.label}{' as one region' if several else ''}"]
    if without and several:
        reasons.append(f"no rule has {' or '.join(without)}")
    inside = dict.fromkeys(rule for rules in found.values() for rule in rules[:_MOST])
    if inside:
        reasons.append(f"parts of it are in {', '.join(inside)}")
    return "; ".join(reasons)


def _rules_with(part: Part, tables: Iterable[tuple[str, Sequence[Rule]]]) -> list[str]:
    """Return the rules that have an operator, those of the shortest patterns first."""
    lengths: dict[str, int] = {}
    for backend, rules in tables:
        for rule in rules:
            having = [calls for calls in sequences(rule) if any(map(part.takes, calls))]
            if having:
                lengths[f"{rule.name} of {backend}"] = min(map(len, having))
    return sorted(lengths, key=lambda name: lengths[name])

# SPDX-License-Identifier: Apache-2.0
"""Random annotations on random programs: they are followed, or refused by an error of qompose's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import qompose
import torch
from hypothesis import HealthCheck, event, given, settings, strategies as st
from qompose import QomposeError, QuantizationSpec, Quantizer
from qompose.observers import (
    HistogramObserver,
    MinMaxObserver,
    PerBlockMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from qompose.program.meta import ANNOTATION_KEY
from qompose.spec import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    SharedQuantizationSpec,
)
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_structure

from tests.core.toy import randn

SIZE = 4


def _write_a_part(a: Tensor, b: Tensor) -> Tensor:
    y = a + b
    y[:, :2].relu_()
    return y


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda m, a, b: m.linear(a),
    "plain": lambda m, a, b: m.plain(a).relu(),
    "conv": lambda m, a, b: m.conv(a.reshape(1, 1, SIZE, SIZE)).view(SIZE, SIZE) + b,
    "lstm": lambda m, a, b: m.lstm(a)[0] + b,
    "add": lambda m, a, b: a + b,
    "twice": lambda m, a, b: a + a,
    "alpha": lambda m, a, b: torch.add(a, b, alpha=2),
    "number": lambda m, a, b: a * 2 + 1,
    "multiply": lambda m, a, b: a * b,
    "matmul": lambda m, a, b: a @ b.t(),
    "cat": lambda m, a, b: torch.cat([a, b, a])[2 : 2 + SIZE],
    "split": lambda m, a, b: torch.cat([(parts := a.split(2))[1], b[:1], parts[0]])[:SIZE],
    "unbind": lambda m, a, b: torch.stack([*a.unbind(0)[1:], b[0]], dim=1),
    "max": lambda m, a, b: (top := a.max(dim=1, keepdim=True))[0] + b + b.gather(1, top[1]),
    "relu": lambda m, a, b: a.relu(),
    "sigmoid": lambda m, a, b: torch.sigmoid(input=a),
    "norm": lambda m, a, b: F.layer_norm(a, (SIZE,), weight=m.plain.weight[0]),
    "embedding": lambda m, a, b: m.table(m.ids) + a,
    "tokens": lambda m, a, b: m.table(a.argmax(1)),
    "where": lambda m, a, b: torch.where(a > b, a, b),
    "in place": lambda m, a, b: (a * 1.5).add_(b),
    "a part": lambda m, a, b: _write_a_part(a, b),
    "half": lambda m, a, b: (a.half() + b.half()).float(),
    "double": lambda m, a, b: (a.double() * 2).float(),
    "scalar": lambda m, a, b: a / (1 + b.abs().sum()),
    "parameter": lambda m, a, b: a + m.linear.weight.t(),
    "input": lambda m, a, b: a.relu_(),
}


class Program(nn.Module):
    """Runs (operation, first operand, second operand) on a pool of 4 x 4 matrices."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        torch.manual_seed(0)
        self.linear, self.plain = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE, bias=False)
        self.conv, self.table = nn.Conv2d(1, 1, 3, padding=1), nn.Embedding(SIZE, SIZE)
        self.lstm = nn.LSTM(SIZE, SIZE) if any(s[0] == "lstm" for s in steps) else None
        self.ids: Tensor
        self.register_buffer("ids", torch.tensor([1, 0, 3, 3]))

    def forward(self, x: Tensor, other: Tensor) -> Any:
        pool = [x * 1, other]
        for name, first, second in self.steps:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            pool.append(OPERATIONS[name](self, a, b))
        return pool[-1], {"earlier": pool[len(pool) // 2], "integers": self.ids + 1}


SYMMETRIC, AFFINE = torch.per_tensor_symmetric, torch.per_tensor_affine
BY_CHANNEL, BY_CHANNEL_AFFINE = torch.per_channel_symmetric, torch.per_channel_affine
PER_CHANNEL = partial(QuantizationSpec, torch.int8, PerChannelMinMaxObserver, -127, 127)
PER_BLOCK = partial(QuantizationSpec, torch.int8, PerBlockMinMaxObserver, -8, 7, BY_CHANNEL)
RUN_TIME = partial(QuantizationSpec, torch.int8, PlaceholderObserver, -128, 127, is_dynamic=True)
CONCRETE: dict[str, QuantizationSpec | FixedQParamsQuantizationSpec] = {
    "int8": QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, AFFINE),
    "histogram": QuantizationSpec(torch.int8, HistogramObserver, -128, 127, AFFINE),
    "uint8": QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, AFFINE),
    "symmetric": QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, SYMMETRIC),
    "int16": QuantizationSpec(torch.int16, MinMaxObserver, None, None, SYMMETRIC),
    "channel 0": PER_CHANNEL(BY_CHANNEL, ch_axis=0), "channel 1": PER_CHANNEL(BY_CHANNEL_AFFINE, ch_axis=1),
    "channel -1": PER_CHANNEL(BY_CHANNEL, ch_axis=-1), "channel 3": PER_CHANNEL(BY_CHANNEL, ch_axis=3),
    "groups of 2": PER_BLOCK(block_size=(2,)), "squares": PER_BLOCK(block_size=(2, 2)),
    "groups of 3": PER_BLOCK(block_size=(3,)), "dynamic": RUN_TIME(qscheme=AFFINE),
    "dynamic symmetric": RUN_TIME(qscheme=SYMMETRIC),
    "per token": RUN_TIME(qscheme=BY_CHANNEL, block_size=(-1,)),
    "fixed": FixedQParamsQuantizationSpec(torch.uint8, 1 / 16, 100, 0, 255, AFFINE),
    "half": QuantizationSpec(torch.float16, PlaceholderObserver),
    "bfloat16": QuantizationSpec(torch.bfloat16, PlaceholderObserver),
}  # fmt: skip


def _derive(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
    scale = torch.ones(())
    for observer in observers:
        scale = scale * observer.calculate_qparams()[0].max()  # type: ignore[operator]
    # Torch dequantizes int32 to float16 in float16, where 65505 is infinite.
    return torch.clamp(scale, min=2**-8), torch.zeros((), dtype=torch.int64)


Place = tuple[int, int]
"""A tensor and its reader, by number: -1 is the output, 20 stands for a node that may not read it."""
Write = tuple[Place, Any, bool]

places = st.tuples(st.integers(0, 30), st.sampled_from([-1, -1, -1, *range(5), 20]))
references = st.one_of(st.integers(0, 7), places)
"""A number is the place of another annotation."""
kinds = st.one_of(
    st.sampled_from(["int8", "int8", "int8", *CONCRETE]),
    st.none(),
    st.tuples(st.just("shared"), references),
    st.tuples(st.just("derived"), st.lists(references, max_size=3)),
)
annotations = st.lists(st.tuples(places, kinds, st.booleans()), min_size=1, max_size=8)
steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 4), st.integers(0, 4)),
    min_size=1,
    max_size=5,
)


class Scribbler(Quantizer):
    """Writes annotations wherever it is told to, over others too."""

    def __init__(self, writes: list[Write], name: str = "scribbler") -> None:
        self.writes, self.label = writes, name

    @property
    def name(self) -> str:
        return self.label

    def annotate(self, model: GraphModule) -> GraphModule:
        nodes = list(model.graph.nodes)
        for place, kind, implicit in self.writes:
            source, user = _resolve(nodes, place)
            holder = source if user is None else user
            annotation = holder.meta.setdefault(ANNOTATION_KEY, QuantizationAnnotation())
            annotation.allow_implicit_sharing = implicit
            spec = self._spec(kind, nodes)
            if user is None:
                annotation.output_qspec = spec
            else:
                annotation.input_qspec_map[source] = spec
        return model

    def _spec(self, kind: Any, nodes: list[Node]) -> Any:
        if kind is None or isinstance(kind, str):
            return None if kind is None else CONCRETE[kind]
        word, reference = kind
        if word == "shared":
            return SharedQuantizationSpec(self._reference(nodes, reference))
        places = [self._reference(nodes, place) for place in reference]
        return DerivedQuantizationSpec(places, _derive, torch.int32, None, None, SYMMETRIC)

    def _reference(self, nodes: list[Node], reference: Any) -> Any:
        if isinstance(reference, int):
            reference = self.writes[reference % len(self.writes)][0]
        source, user = _resolve(nodes, reference)
        return source if user is None else (source, user)


def _resolve(nodes: list[Node], place: Place) -> tuple[Node, Node | None]:
    read = [node for node in nodes if node.users]
    source, reader = read[place[0] % len(read)], place[1]
    if reader < 0:
        return source, None
    if reader < 20:
        return source, list(source.users)[reader % len(source.users)]
    return nodes[place[0] % len(nodes)], nodes[(7 * place[0]) % len(nodes)]


def examples() -> tuple[Tensor, Tensor]:
    return randn(SIZE, SIZE, seed=1), randn(SIZE, SIZE, seed=2).sigmoid()


def follow(program: list[tuple[str, int, int]], quantizer: Quantizer) -> None:
    """Prepare, calibrate and convert: an error of qompose's own, or a model that runs."""
    model = Program(program).eval()
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attributes self.lstm")  # torch 2.13
            exported = torch.export.export(model, examples())
        expected = exported.module(check_guards=False)(*examples())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", qompose.QomposeWarning)
                prepared = qompose.prepare_pt2e(exported, quantizer)
            assert_like(expected, prepared(*examples()), exact=True)
            converted = qompose.convert_pt2e(prepared)
        except QomposeError as error:
            assert not isinstance(error, qompose.errors.InternalError)
            event(type(error).__name__)
            return
        event("followed" if prepared.meta["qompose"].plan.groups else "nothing to do")
        assert_like(expected, converted(*examples()), exact=False)
        qompose.report(converted).to_dict()


def assert_like(expected: Any, actual: Any, *, exact: bool) -> None:
    """The same structure, dtypes and shapes; equal bits for a prepared model, finite for a converted one."""
    assert tree_structure(expected) == tree_structure(actual)
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other) if exact else bool(torch.isfinite(other).all())


@pytest.mark.parametrize("examples", [40, pytest.param(200, marks=pytest.mark.full)])
def test_any_annotations_are_followed_or_refused(examples: int) -> None:
    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(steps, annotations, st.none() | annotations, st.sampled_from(["error", "first"]))
    def check(program: Any, one: list[Write], other: list[Write] | None, policy: str) -> None:
        members = [Scribbler(one)] if other is None else [Scribbler(one), Scribbler(other, "other")]
        follow(program, qompose.compose(*members, on_conflict=policy))

    check()

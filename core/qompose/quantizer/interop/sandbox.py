# SPDX-License-Identifier: Apache-2.0
"""What foreign code may not change: the program, its tensors, its symbolic sizes.

What code of a quantizer changed in a program that it may look at, and in observers that it is shown.

What a quantizer writes to tensors of its copy of a program must not reach the user's model.

What code of a quantizer lets torch assume of symbolic sizes, taken back.

All copies of an exported program have the symbols of the user's own, and one environment that knows about
them. A pass that asks whether two sizes are equal makes them equal there: the user's program would from then
on refuse the inputs for which they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from qompose.errors import UserError
from qompose.observers.make_observer import fixed_parameters
from qompose.program.control_flow import nodes_in
from qompose.program.graph import address_of, get_attribute, owner_of, set_attribute, value_of
from qompose.program.meta import CUSTOM_KEY
from qompose.spec.quantization_spec import EdgeOrNode

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


def own_constants(model: GraphModule) -> None:
    """Give a copy of a program its own buffers and constants, in place, which are small as a rule."""
    copies: dict[int, Tensor] = {}
    for node in nodes_in(model):
        value = get_attribute(owner_of(node), str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            copies.setdefault(id(value), value.clone())
            set_attribute(owner_of(node), str(node.target), copies[id(value)])


@contextmanager
def tensors_kept(model: GraphModule, who: str, *, buffers: bool = False) -> Iterator[None]:
    """Check that a block writes to no parameter of a program; it shares them with the user's model.

    Args:
        buffers: check buffers and constants too, where they are not `own_constants`.

    Raises:
        UserError: it did. What stood there is lost.
    """
    tensors = {**dict(model.named_parameters()), **(dict(model.named_buffers()) if buffers else {})}
    before = {name: digest(value) for name, value in tensors.items()}
    raised: Exception | None = None
    try:
        yield
    except Exception as error:  # the quantizer's; what it wrote before matters more
        raised = error
    written = [name for name, value in tensors.items() if digest(value) != before[name]]
    if written:
        what = (
            "parameters"
            if all(isinstance(tensors[n], nn.Parameter) for n in written)
            else "tensors"
        )
        raise UserError(
            f"{who} wrote to {what} of the model in place: {', '.join(written)}. Their values are lost: "
            "make the model anew, and mend the quantizer; it may put new tensors into its own copy of the "
            f"program{f'. Then it failed: {raised}' if raised else ''}"
        ) from raised
    if raised is not None:
        raise raised


_WORD = 8
_CHUNK = 1 << 16
_MODULUS = (1 << 64) - 59  # a prime


def digest(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that is another one, as good as certainly, where a number was changed or moved.

    The bits are summed by 64 of them, each times an odd number of its place within a chunk; the sums of
    chunks are the digits of a number. One pass: 25 ms for 100 MB on one core.
    """
    facts = (tensor.dtype, tuple(tensor.shape))
    if tensor.is_meta or tensor.layout is not torch.strided:
        return facts
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % _WORD
    weights, total = _weights().to(flat.device), 0
    for chunk in torch.split(flat[:whole].view(torch.int64), _CHUNK):
        total = (total * _CHUNK + int((chunk * weights[: chunk.numel()]).sum())) % _MODULUS
    return (*facts, total, tuple(flat[whole:].tolist()))


@cache
def _weights() -> Tensor:
    """Return odd numbers, always the same: times each of them, different words stay different."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator, device="cpu") * 2 + 1


_KNOWLEDGE = (
    "guards",
    "axioms",
    "var_to_range",
    "var_to_range_sloc",
    "replacements",
    "replacements_slocs",
    "unbacked_renamings",
    "divisible",
    "size_like",
    "deferred_runtime_asserts",
    "num_deferred_runtime_asserts",
    "symbol_guard_counter",
    "exclusion_constraints",
    "specializations",
    "_equality_graph",
    "_unbacked_replacements",
)
"""Attributes of torch's ShapeEnv that say what holds for symbols. It has no public way to take it back."""
_VERSIONS = ("_version_counter", "_replacements_version_counter")


@contextmanager
def sizes_kept(model: GraphModule) -> Iterator[list[str]]:
    """Take back what a block lets torch assume of a program's symbolic sizes. Symbols that it makes stay.

    Yields:
        a list that is empty, and once the block is left has a text for each assumption that does not
        follow from what was known before: "Eq(L['x'].size()[2], L['x'].size()[3])".
    """
    assumed: list[str] = []
    with ExitStack() as stack:
        for environment in _environments(model):
            known = _Knowledge(environment)
            stack.callback(lambda known=known: assumed.extend(known.restore()))  # type: ignore[misc]
        yield assumed


def _environments(model: GraphModule) -> list[Any]:
    """Return the environments whose symbols occur in what export recorded of values."""
    found: dict[int, Any] = {}
    for node in nodes_in(model):
        for value in pytree.tree_leaves(value_of(node)):
            environment = _environment(value)
            if environment is not None:
                found[id(environment)] = environment
    return list(found.values())


def _environment(value: object) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return getattr(value.node, "shape_env", None)
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


class _Knowledge:
    """What an environment knew when this was made."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.symbols = frozenset(environment.var_to_range)
        self.facts = _known_sizes(environment)

    def restore(self) -> list[str]:
        """Put it back, and describe what was assumed since then of the symbols that there were."""
        environment = self.environment
        if _known_sizes(environment) == self.facts:
            return []
        added = list(dict.fromkeys(self._added()))
        for name, fact in self.facts.items():
            setattr(environment, name, self._before(fact, getattr(environment, name)))
        _forget(environment)
        return [
            _in_words(expression, environment)
            for expression in added
            if expression.free_symbols <= self.symbols
            and environment._maybe_evaluate_static(expression) != True  # noqa: E712 (sympy's)
        ]

    def _added(self) -> Iterator[Any]:
        """Yield what holds now by guards, by assertions at run time, and by symbols that became others."""
        environment = self.environment
        yield from (guard.expr for guard in environment.guards[len(self.facts["guards"]) :])
        for symbol, asserted in environment.deferred_runtime_asserts.items():
            known = len(self.facts["deferred_runtime_asserts"].get(symbol, ()))
            yield from (one.expr for one in asserted[known:])
        for symbol in environment.replacements.keys() - self.facts["replacements"].keys():
            yield sympy.Eq(symbol, environment.replacements[symbol])

    def _before(self, fact: Any, now: Any) -> Any:
        """Return a fact as it was, with what is now said of symbols that were made since."""
        if not isinstance(fact, Mapping):
            return fact
        new = {key: value for key, value in now.items() if self._is_new(key)}
        result: Any = _copied(fact)
        result.update(new)
        return result

    def _is_new(self, key: object) -> bool:
        return getattr(key, "is_Symbol", False) and key not in self.symbols


def _forget(environment: Any) -> None:
    """Let caches of an environment's answers go, with which it would answer without a guard."""
    for name in _VERSIONS:  # never back: an equal version is taken for an equal state
        if hasattr(environment, name):
            setattr(environment, name, getattr(environment, name) + 1)
    if hasattr(environment, "_prev_cache_key"):  # what a version is compared by: how much is known
        environment._prev_cache_key = environment._get_key()
    for method in vars(type(environment)).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()


def _known_sizes(environment: Any) -> dict[str, Any]:
    present = (name for name in _KNOWLEDGE if hasattr(environment, name))
    return {name: _copied(getattr(environment, name)) for name in present}


def _copied(fact: Any) -> Any:
    copied = fact.copy() if hasattr(fact, "copy") else fact
    if isinstance(copied, dict):
        for key, value in copied.items():
            if isinstance(value, list):
                copied[key] = list(value)
    return copied


def _in_words(expression: Any, environment: Any) -> str:
    """Return an expression with the inputs' sizes for symbols, where they are known."""
    text = str(expression)
    for symbol in expression.free_symbols:
        sources = environment.var_to_sources.get(symbol)
        if sources:
            name = sources[0].name
            text = text.replace(str(symbol), name() if callable(name) else name)
    return text

# SPDX-License-Identifier: Apache-2.0
"""What an algorithm is: the steps at which stages ask it, and what it may change at each of them.

A package offers one by the word that configurations ask for, and each fault is kept apart::

    [project.entry-points."qompose.algorithms"]
    stochastic = "my_package:StochasticRounding"

The value is a subclass of `Algorithm` that needs no arguments, or an object of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias, TypeVar, get_args

import torch
from importlib_metadata import EntryPoint
from torch import Tensor
from torch.fx import GraphModule, Node

from qompose.algorithms.calibrated import Calibrated
from qompose.backend.discovery import (
    BROKEN,
    USABLE,
    BackendInfo,
    Health,
    algorithms,
    describe_error,
    import_fault,
)
from qompose.entry_points import ALGORITHM_GROUP
from qompose.errors import ConfigError, PluginError, blaming, near_names
from qompose.observers.channel_ranges import Balance
from qompose.observers.input_sums import Columns, watch_means, watch_moments
from qompose.plan.plan import Group, Rewrite
from qompose.program.graph import constant_of, describe, own_copy, value_of
from qompose.spec.algorithm_choice import ALGORITHM_WORDS, word_of
from qompose.spec.claim import Claim
from qompose.spec.qdq import QParams
from qompose.spec.qparams import SYMMETRIC

if TYPE_CHECKING:
    from qompose.algorithms.blocks import Block

Part: TypeAlias = Literal["product", "block"]
"""What an algorithm learns of together."""


@dataclass(frozen=True)
class Rewritten:
    """What an algorithm did to a program before it is observed.

    Attributes:
        made: a rewrite for each change.
        refused: a line for each that was asked for and is not possible, with the reason.
    """

    made: tuple[Rewrite, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Watched:
    """The tensors whose channel ranges, and some rows, an algorithm wants kept.

    Attributes:
        groups: by number of the group, what may be done to its channels.
        refused: a line for each tensor that was asked for and cannot be changed, with the reason.
    """

    groups: Mapping[int, Balance] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


class NotChanged(Exception):  # noqa: N818 - a state, not a mistake
    """Raised with the reason why a product stays as it is."""


class NotKnown(NotChanged):
    """Raised where statistics do not have what it takes."""


class Algorithm:
    """Something that changes a program for the accuracy of its integers.

    Stages call the methods of each algorithm that a program's claims ask for, and know none by name. Override
    what you need: every method does nothing by default. In training only `watch_channels` is called, and what
    it wants is not kept. A subclass with options is best a frozen dataclass: two configurations ask for the
    same algorithm if the objects are equal.

    Lines of the report begin with its word and those options, which tell what was learned by it from what an
    algorithm with others has learned.

    Attributes:
        word: by which configurations ask for it, in `algorithms=`.
        needs_data: whether it changes nothing without calibration data. What `learns` need not say so.
    """

    word: ClassVar[str] = ""
    needs_data: ClassVar[bool] = False

    def __str__(self) -> str:
        """Return its word, and what fields of a dataclass hold that are compared and have other defaults."""
        one: Any = self
        known = fields(one) if is_dataclass(one) else ()
        given = [f for f in known if f.compare and getattr(self, f.name) != f.default]
        options = ", ".join(f"{f.name} {getattr(self, f.name)}" for f in given)
        return f"{self.word} with {options}" if options else str(self.word)

    def is_asked(self, claim: Claim) -> bool:
        """Tell whether a claim asks for it, by its word or as an equal object."""
        return any(
            choice == self
            or (not isinstance(choice, Algorithm) and self._is_named(word_of(choice)))
            for choice in claim.algorithms
        )

    def _is_named(self, word: str) -> bool:
        """Tell whether it is what a word stands for, not the same with other options."""
        if word != self.word:
            return False
        installed = _INSTALLED.get(word)
        return str(self) == word if installed is None else self == installed

    def is_wanted(self, claim: Claim, found: Calibrated | None = None) -> bool:
        """Tell whether a claim asks for it, or leaves it to the engine.

        Of a calibrated program that mostly saw the same rows (`Calibrated.repeated`), what is left to the
        engine is not wanted, and noted as left out.
        """
        if self.is_asked(claim):
            return True
        if not any(map(self._is_named, claim.unasked)):
            return False
        if found is None or not found.repeated:
            return True
        found.left_out.add(self.word)
        return False

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        """Change the parameters of a program, in place, once it is known who claims what."""
        return Rewritten()

    def watch_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> Watched:
        """Return the groups whose channels are to be looked at one by one."""
        return Watched()

    def watch_means(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, int, bool]]:
        """Yield the values whose means are to be kept, with the dimension of their channels.

        And whether a configuration asks for that by word, so that statistics without them are an error.
        """
        yield from ()

    def watch_moments(
        self, claims: Sequence[Claim], nodes: Mapping[str, Node]
    ) -> Iterator[tuple[Node, Columns, int]]:
        """Yield the values whose second moments are to be kept, of which columns, and how many there are."""
        yield from ()

    def choose_factors(self, found: Calibrated, number: int, balance: Balance) -> None:
        """Decide on the factors of a group whose channels it watches.

        Those of earlier groups are decided; no quantization parameters are known yet.
        """

    def scale_inputs(self, found: Calibrated) -> None:
        """Decide on the factors of float tensors that products read (`Calibrated.divide`).

        Factors of groups are decided; no quantization parameters are known yet.
        """

    def choose_qparams(self, found: Calibrated, number: int, q: QParams) -> QParams | None:
        """Return other quantization parameters for a weight than its observer gives; None leaves it those.

        All factors are chosen.
        """
        return None

    def learns(self, claim: Claim) -> Part | None:
        """Return what is to be learned of together for a claim that asks for it; None if nothing is.

        That is its "product" alone, or the "block" around it: the innermost module that is repeated, as
        `layers.0` is where there are `layers.1` and others of its class, and the product where there is none.
        """
        return None

    def learn(self, found: Calibrated, block: Block) -> None:
        """Decide on weights of a block with calibration data, the quantized program before it being decided.

        `qompose.calibrate` calls it, for each block in the order of the program. All quantization parameters
        are known; of what it decides, scales and integers of the block's weights are kept. Where an algorithm
        before it has chosen integers, they stay.

        Conversion calls `correct` afterwards, which finds what was learned in `Calibrated.integers`. What it
        chooses for weights of which nothing was learned is not seen here.
        """

    def correct(self, found: Calibrated) -> None:
        """Change integers, and parameters that stay in float; all quantization parameters are known."""


_TINY: Final = torch.finfo(torch.float32).tiny
"""The smallest normal number."""


def check_qparams(chosen: object, given: QParams, spec: object) -> None:
    """Check that an algorithm's quantization parameters can stand in place of those it was given.

    Kernels do not read the zero points of a symmetric specification.
    """
    if not isinstance(chosen, QParams):
        raise TypeError(f"expected QParams or None, got {chosen!r}")
    for name in ("scale", "zero_point"):
        value, wanted = getattr(chosen, name), getattr(given, name)
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {value!r}")
        if value.shape != wanted.shape:
            raise ValueError(
                f"{name} must have the shape {tuple(wanted.shape)}, got {tuple(value.shape)}"
            )
        if value.is_floating_point() != wanted.is_floating_point():
            raise TypeError(f"{name} must have a type like {wanted.dtype}, got {value.dtype}")
    scale = chosen.scale.float()  # as kernels do, which may take what is not normal for zero
    if not bool((scale.isfinite() & (scale >= _TINY)).all()):
        raise ValueError(f"scale must be positive, finite and at least {_TINY:.3g}")
    _check_zero_points(chosen, given, spec)
    for name in ("low", "high", "dtype", "axis", "blocks"):
        if (value := getattr(chosen, name)) != (wanted := getattr(given, name)):
            raise ValueError(f"{name} must stay {wanted}, got {value}")


def _check_zero_points(chosen: QParams, given: QParams, spec: object) -> None:
    """Check zero points that differ from those of before: kernels store them like integers."""
    zeros = chosen.zero_point
    if torch.equal(zeros, given.zero_point):
        return
    if getattr(spec, "qscheme", None) in SYMMETRIC:
        raise ValueError("the zero points of a symmetrically quantized tensor cannot be changed")
    if zeros.is_floating_point():
        if not bool(zeros.isfinite().all()):
            raise ValueError("zero_point must be finite")
    elif not (given.low <= int(zeros.min()) and int(zeros.max()) <= given.high):
        raise ValueError(f"zero_point must be within [{given.low}, {given.high}]")


def check_integers(integers: object, q: QParams, shape: torch.Size) -> None:
    """Check that a weight of a shape can have integers, in the type and bounds of its parameters."""
    expected = f"integers must be {q.dtype} of shape {tuple(shape)}"
    if not isinstance(integers, Tensor):
        raise TypeError(f"{expected}, got {type(integers).__name__}")
    if (integers.shape, integers.dtype) != (shape, q.dtype):
        raise ValueError(f"{expected}, got {integers.dtype} of shape {tuple(integers.shape)}")
    if integers.numel() and not (q.low <= int(integers.min()) and int(integers.max()) <= q.high):
        raise ValueError(f"integers must be within [{q.low}, {q.high}]")


@contextmanager
def at(where: str) -> Iterator[None]:
    """Let an error of these checks say what they look at."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _check_parameter(found: Calibrated, name: str, value: object) -> None:
    """Check that a tensor can take the place of a parameter of a program."""
    node = found.nodes.get(name)
    old = None if node is None else constant_of(node)
    if old is None:
        known = [n for n, node in found.nodes.items() if constant_of(node) is not None]
        raise ValueError(
            f"{name!r} is not a parameter of the program{near_names(name, known)}; use the name of "
            "a node that reads one, such as product.bias.name"
        )
    expected = f"parameter {name} must be {old.dtype} of shape {tuple(old.shape)}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{expected}, got {type(value).__name__}")
    if (value.shape, value.dtype) != (old.shape, old.dtype):
        raise ValueError(f"{expected}, got {value.dtype} of shape {tuple(value.shape)}")
    if not bool(value.isfinite().all()) and bool(old.isfinite().all()):
        raise ValueError(f"parameter {name} must be finite")


def _check_group(found: Calibrated, number: int, before: QParams | None) -> None:
    """Check what was decided on a group, against the parameters that it had before."""
    q, group = found.qparams.get(number), found.plan.groups[number]
    name, user = group.points[0].source, group.points[0].user
    where = f"{name} of {describe(found.nodes[user])}" if user else name
    with at(where):
        if q is None or before is None:
            raise ValueError("it has no quantization parameters at this step")
        check_qparams(q, before, group.spec)
        if number in found.integers:
            check_integers(found.integers[number], q, value_of(found.nodes[name]).shape)


@contextmanager
def _checked(found: Calibrated, *, groups: bool) -> Iterator[None]:
    """Check what a step writes to a calibrated program, which need not go through functions that check it.

    Args:
        groups: whether quantization parameters and integers are looked at, which takes as long as there are
            many: steps that are asked for each group leave them to others.
    """
    parameters = dict(found.parameters)
    qparams, integers = (dict(found.qparams), dict(found.integers)) if groups else ({}, {})
    yield
    for name, value in found.parameters.items():
        if name not in parameters or value is not parameters[name]:
            _check_parameter(found, name, value)
            found.parameters[name] = own_copy(value)  # whoever gave it may write to it again
    for number in {**qparams, **found.qparams, **found.integers} if groups else ():
        now = found.qparams.get(number), found.integers.get(number)
        if now[0] is not qparams.get(number) or now[1] is not integers.get(number):
            _check_group(found, number, qparams.get(number))


def _check_learned(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Refuse parameters that were set where only scales and integers of weights are kept."""
    if other := [name for name, value in now.items() if value is not before.get(name)]:
        raise ValueError(
            f"{', '.join(other)} cannot be learned: `learn` decides on scales and integers of weights. Set "
            "parameters that stay in float in `correct`, which finds what was learned"
        )


UNREPORTED: Final = "reported neither a change nor a reason"


_T = TypeVar("_T")


def _returned(value: _T, kind: type[_T]) -> _T:
    """Return what a step returned, which must be of a kind."""
    if not isinstance(value, kind):
        raise TypeError(f"it must return {kind.__name__}, got {value!r}")
    return value


def _each_of(values: Iterator[_T], *kinds: type) -> list[_T]:
    """Return what a step yields: tuples with one of each kind."""
    found = list(values)
    for value in found:
        given = value if isinstance(value, tuple) else ()
        if len(given) != len(kinds) or not all(map(isinstance, given, kinds)):
            wanted = ", ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"it must yield tuples ({wanted}), got {value!r}")
    return found


def _part(value: object) -> Part | None:
    """Return what is to be learned of together, which must be a word that is known."""
    known: dict[object, Part] = {word: word for word in get_args(Part)}
    if value is None or (isinstance(value, str) and value in known):
        return None if value is None else known[value]
    words = ", ".join(map(repr, known))
    raise ValueError(f"it must return one of {words} or None, got {value!r}")


@contextmanager
def _blamed(who: str, found: Calibrated | None, groups: bool) -> Iterator[None]:
    with blaming(who), nullcontext() if found is None else _checked(found, groups=groups):
        yield


@dataclass(frozen=True)
class Algorithms:
    """The algorithms that stages ask, in their order. What one raises says whose it is."""

    members: tuple[Algorithm, ...]

    def _each(
        self, step: str, found: Calibrated | None = None, *, groups: bool = False
    ) -> Iterator[tuple[Algorithm, AbstractContextManager[None]]]:
        """Yield each with the context of its step, which checks what it writes to a calibrated program."""
        for algorithm in self.members:
            name = algorithm.word or type(algorithm).__name__
            yield algorithm, _blamed(f"algorithm {name} (step {step!r})", found, groups)

    def rewrite(self, model: GraphModule, claims: Sequence[Claim]) -> Rewritten:
        """Let each change the parameters of a program, in place; return what all did."""
        found = list[Rewritten]()
        for algorithm, blamed in self._each("rewrite"):
            with blamed:
                found.append(_returned(algorithm.rewrite(model, claims), Rewritten))
        made = tuple(rewrite for one in found for rewrite in one.made)
        return Rewritten(made, tuple(line for one in found for line in one.refused))

    def with_channels(
        self, model: GraphModule, claims: Sequence[Claim], groups: Sequence[Group]
    ) -> tuple[tuple[Group, ...], list[str]]:
        """Return groups with what is to be known of their channels, and what was refused."""
        result, refused = tuple(groups), list[str]()
        for algorithm, blamed in self._each("watch channels"):
            with blamed:
                found = _returned(algorithm.watch_channels(model, claims, result), Watched)
            result = tuple(
                replace(group, balance=found.groups.get(number, group.balance))
                for number, group in enumerate(result)
            )
            refused += found.refused
        return result, refused

    def insert_observers(self, claims: Sequence[Claim], nodes: Mapping[str, Node]) -> None:
        """Insert the observers of means and moments that are wanted, in place."""
        means, moments = list[tuple[Node, int, bool]](), list[tuple[Node, Columns, int]]()
        for algorithm, blamed in self._each("watch inputs"):
            with blamed:
                means += _each_of(algorithm.watch_means(claims, nodes), Node, int, bool)
                moments += _each_of(algorithm.watch_moments(claims, nodes), Node, Columns, int)
        watch_means(means)
        watch_moments(moments)

    def choose_factors(self, found: Calibrated, number: int) -> None:
        """Let the algorithm that watches a group's channels decide on their factors."""
        balance = found.plan.groups[number].balance
        for algorithm, blamed in self._each("choose factors", found):
            if balance is not None and algorithm.word == balance.algorithm:
                with blamed:
                    algorithm.choose_factors(found, number, balance)

    def scale_inputs(self, found: Calibrated) -> None:
        """Let each decide on the factors of float tensors."""
        for algorithm, blamed in self._each("scale inputs", found):
            with blamed:
                algorithm.scale_inputs(found)

    def choose_qparams(self, found: Calibrated, number: int, q: QParams) -> QParams:
        """Return the parameters that they leave a group, each with those of the one before."""
        for algorithm, blamed in self._each("choose quantization parameters", found):
            with blamed:
                chosen = algorithm.choose_qparams(found, number, q)
                if chosen is not None:
                    check_qparams(chosen, q, found.plan.groups[number].spec)
                    q = chosen
        return q

    def learning(self, claims: Sequence[Claim]) -> Iterator[tuple[Algorithm, int, Part]]:
        """Yield the algorithms that learn, each with the number of a claim and what it learns of together."""
        for algorithm, blamed in self._each("select what to learn"):
            with blamed:
                parts = [
                    (number, _part(algorithm.learns(claim)))
                    for number, claim in enumerate(claims)
                    if algorithm.is_asked(claim)
                ]
            yield from ((algorithm, number, part) for number, part in parts if part is not None)

    def without_data(self, claims: Sequence[Claim]) -> Counter[str]:
        """Count by word the claims that ask for what needs calibration data."""
        learning = [(algorithm.word, number) for algorithm, number, _ in self.learning(claims)]
        needing = [
            (algorithm.word, number)
            for algorithm in self.members
            for number, claim in enumerate(claims)
            if algorithm.needs_data and algorithm.is_asked(claim)
        ]
        return Counter(word for word, _ in dict.fromkeys((*learning, *needing)))

    def learn(self, algorithm: Algorithm, found: Calibrated, block: Block) -> None:
        """Let one of them decide on the weights of a block."""
        for member, blamed in self._each(f"learn {block.name}", found, groups=True):
            if member is algorithm:
                before = dict(found.parameters)
                with blamed:
                    member.learn(found, block)
                    _check_learned(before, found.parameters)

    def correct(self, found: Calibrated, *, unlearned: bool = False) -> None:
        """Let each change integers and parameters.

        Args:
            unlearned: whether algorithms are to learn only then. Integers and scales that one gives the
                weights it is to learn of are dropped, since `learn` could not decide on them any more.
        """
        for algorithm, blamed in self._each("correct", found, groups=True):
            before = dict(found.integers), dict(found.qparams)
            with blamed:
                algorithm.correct(found)
            if unlearned:
                for number in self._learned_groups(algorithm, found):
                    _put_back(number, found.integers, before[0])
                    _put_back(number, found.qparams, before[1])
        found.refused.extend(self._silent(found))

    def _learned_groups(self, algorithm: Algorithm, found: Calibrated) -> Iterator[int]:
        """Yield the groups of claims of which an algorithm learns."""
        learning = self.learning(found.plan.claims)
        claims = {number for one, number, _ in learning if one is algorithm}
        for number, group in enumerate(found.plan.groups):
            if not claims.isdisjoint(group.claims):
                yield number

    def _silent(self, found: Calibrated) -> Iterator[str]:
        """Yield a line for each algorithm that was asked for and reported nothing.

        Those that rewrite, watch channels or learn have their lines elsewhere.
        """
        elsewhere = ("rewrite", "watch_channels", "learns")
        for algorithm in self.members:
            kind, lines = type(algorithm), (*found.made, *found.refused)
            reports_here = all(
                getattr(kind, step) is getattr(Algorithm, step) for step in elsewhere
            )
            asked = any(map(algorithm.is_asked, found.plan.claims))
            if asked and reports_here and not any(algorithm.word in str(line) for line in lines):
                yield f"{algorithm.word} was requested, but {UNREPORTED}"


def _put_back(number: int, now: dict[int, Any], before: Mapping[int, Any]) -> None:
    """Let a group have what it had, which may be nothing."""
    now.pop(number, None)
    if number in before:
        now[number] = before[number]


def load_algorithm(word: str) -> Algorithm:
    """Import the algorithm that an installed package offers by a word, once per process.

    Raises:
        ConfigError: no installed package offers it.
        PluginError: it cannot be imported, or is not an algorithm of that word.
    """
    found = {info.name: info for info in algorithms()}
    if word not in found:
        hint = near_names(word, [*ALGORITHM_WORDS, *found])
        raise ConfigError(
            f"no installed package provides the algorithm {word!r}{hint}. Installed: "
            f"{', '.join(found) or 'none'}"
        )
    outcome = _load(found[word])
    if isinstance(outcome, str):
        raise PluginError(word, found[word].source, outcome, found[word].kind)
    _INSTALLED[word] = outcome
    return outcome


_INSTALLED: dict[str, Algorithm] = {}
"""What was loaded of other packages, by word."""


def check_algorithm(info: BackendInfo) -> Health:
    """Load a listed algorithm and return whether it can be used."""
    outcome = _load(info)
    return Health(BROKEN, outcome) if isinstance(outcome, str) else Health(USABLE)


@cache
def _load(info: BackendInfo) -> Algorithm | str:
    """Load an algorithm, once; the outcome may be the reason why it cannot be used."""
    if info.problem is not None:
        return info.problem
    if info.name in ALGORITHM_WORDS:
        return f"{info.name!r} is a built-in algorithm of qompose; choose another name"
    try:
        found = EntryPoint(info.name, info.module, ALGORITHM_GROUP).load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a package that exits must not end its host
        return import_fault(error, info.module, info.distribution)
    if isinstance(found, type) and issubclass(found, Algorithm):
        try:
            found = found()
        except Exception as error:
            return f"it cannot be created without arguments: {describe_error(error)}"
    if not isinstance(found, Algorithm):
        return f"its entry point is {found!r}, not a qompose.algorithms.Algorithm"
    if found.word != info.name:
        return f"its name is {found.word!r}, but its entry point is named {info.name!r}"
    return found

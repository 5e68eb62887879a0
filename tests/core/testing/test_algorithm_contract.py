# SPDX-License-Identifier: Apache-2.0
"""The contract of algorithms: qompose's keep it, and a wrong one breaks the promise that it is wrong in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from qompose.algorithms import (
    Algorithm,
    NotChanged,
    SignRound,
    change_products,
    for_each_value,
    set_integers,
    weight_group,
    weight_of,
)
from qompose.spec.algorithm_choice import ALGORITHM_WORDS
from qompose.testing import AlgorithmContract
from qompose.testing.contracts import Contract, names_of_tests
from torch import Tensor

from tests.core.sound_backend import LINEAR, SoundBackend
from tests.core.sound_products import conv
from tests.core.testing.test_testing import failures

SOUND = SoundBackend([LINEAR, conv()])
TESTS = names_of_tests(AlgorithmContract)


def contract_of(algorithm: Any, **facts: Any) -> type[AlgorithmContract]:
    return type(
        "Contract", (AlgorithmContract,), {"algorithm": algorithm, "backends": (SOUND,), **facts}
    )


@dataclass(frozen=True)
class Rounding(Algorithm):
    """Rounds up or down by draws of its own; what is wrong with it is its field."""

    word: ClassVar[str] = "rounding"
    wrong: str = ""

    def correct(self, found: Any) -> None:
        generator = torch.Generator().manual_seed(0)

        def change(product: Any, claim: Any) -> str:
            weight, (_, q) = weight_of(found, product), weight_group(found, product)
            scale, zero_point = for_each_value(q, weight.shape)
            steps = weight / scale + zero_point + self.offsets(weight.shape, generator)
            integers = steps.floor().clamp(q.low, q.high).to(q.dtype)
            set_integers(found, product, integers)
            if self.wrong == "writes":
                found.nodes[product.weight.name].graph.owning_module.get_parameter(
                    str(product.weight.target)
                ).data.add_(1)
            return "rounded"

        if self.wrong == "silent":
            seen = len(found.made)
            change_products(found, self, change)
            del found.made[seen:]
        else:
            change_products(found, self, change)

    def offsets(self, shape: Any, generator: torch.Generator) -> Tensor:
        """Return what is added before integers are cut off; 0.5 is rounding to nearest."""
        if self.wrong == "draws":
            return torch.rand(shape)
        if self.wrong == "counts":
            return torch.full(shape, 0.4 + 0.2 * (next(COUNT) % 2))
        if self.wrong == "coarse":
            return torch.rand(shape, generator=generator) * 200 - 100
        return torch.rand(shape, generator=generator)


COUNT = iter(range(10**9))


class Unequal(Rounding):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Odd(Rounding):
    """Expects that every input has values."""

    def correct(self, found: Any) -> None:
        sizes = [float(q.scale.min()) for q in found.qparams.values()]
        if min(sizes) < 1e-6 or max(sizes) > 1e6:
            raise ZeroDivisionError
        super().correct(found)


class Unwritten(Rounding):
    def correct(self, found: Any) -> None:
        super().correct(found)
        found.made.append(3)


WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing wrong": (Rounding(), ()),
    "no line": (Rounding("silent"), ("test_says_what_it_did",)),
    "global draws": (Rounding("draws"), ("test_repeats", "test_takes_data_in_parts")),
    "a state": (Rounding("counts"), ("test_repeats", "test_takes_data_in_parts")),
    "random integers": (Rounding("coarse"), ("test_loses_little",)),
    "a weight written": (
        Rounding("writes"),
        (
            *("test_leaves_the_program_alone", "test_reaches_kernels", "test_repeats"),
            "test_takes_data_in_parts",
        ),
    ),
    "unequal copies": (Unequal(), ("test_equals_its_copy",)),
    "an error of its own": (Odd(), ("test_takes_odd_data",)),
    "no record": (Unwritten(), ("test_is_saved",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_algorithm_breaks_its_promise(name: str) -> None:
    algorithm, failing = WRONG[name]
    found = failures(contract_of(algorithm), failing or TESTS)
    assert tuple(sorted(found)) == failing


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_no_other_promise_is_broken(name: str) -> None:
    algorithm, failing = WRONG[name]
    found = failures(contract_of(algorithm), TESTS)
    assert tuple(sorted(found)) == failing


QUICK = {"sign_round": SignRound(iterations=12)}


@pytest.mark.parametrize(
    "asked",
    [
        *(QUICK.get(word, word) for word in ALGORITHM_WORDS),
        *(pytest.param(word, marks=pytest.mark.full) for word in QUICK),
    ],
    ids=str,
)
def test_ours_keep_it(asked: Any) -> None:
    """Places where a word may not be asked for are left out."""
    contract = contract_of(asked)
    assert failures(contract, TESTS) == {}
    modes = {SOUND.configs[place.case.config].mode for place in contract.suite().places}
    assert ("weight-only" if asked == "awq" else "static") in modes


def test_every_kind_of_weight_is_a_place() -> None:
    places = contract_of("gptq").suite().places
    assert {(place.case.rule, place.case.config) for place in places} >= {
        ("linear", "static"), ("linear", "dynamic"), ("linear", "weight-only"), ("conv1d", "static"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "facts", "named"),
    [
        ("gtpq", {}, "gptq"), (3, {}, "3"), (Algorithm(), {}, "word"),
        ("gptq", {"backends": (SoundBackend([]),)}, "sound"), ("gptq", {"backends": "sound"}, "backends"),
        ("gptq", {"most_lost": "3"}, "most_lost"), ("", {}, "algorithm"),
    ],
)  # fmt: skip
def test_what_cannot_be_tested_is_named(source: Any, facts: Any, named: str) -> None:
    contract = contract_of(source, **facts)
    ((test, (message,)),) = failures(contract, TESTS).items()
    assert test == "test_loads"
    assert named in message


def test_what_is_overridden_without_a_reason() -> None:
    whole: Callable[..., Any] = lambda self: None  # noqa: E731
    contract = contract_of("gptq", test_repeats=whole)
    assert issubclass(contract, Contract)
    assert [*failures(contract, ["test_contract_is_whole"])] == ["test_contract_is_whole"]
    with pytest.raises(TypeError, match="test_contract_is_whole"):
        contract_of("gptq", test_contract_is_whole=whole)


def test_a_reason_is_no_failure() -> None:
    """`NotChanged` is what an algorithm says where it does nothing."""

    class Never(Algorithm):
        word = "never"

        def correct(self, found: Any) -> None:
            def change(product: Any, claim: Any) -> str:
                raise NotChanged("it is the test's")

            change_products(found, self, change)

    never = Never()
    assert failures(contract_of(staticmethod(lambda: never)), ["test_says_what_it_did"]) == {}

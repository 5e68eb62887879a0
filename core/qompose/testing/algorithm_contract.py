# SPDX-License-Identifier: Apache-2.0
"""AlgorithmContract, whose tests pytest generates from the weights of installed backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from qompose.testing.algorithm_suite import AlgorithmSource, AlgorithmSuite
from qompose.testing.checks_algorithm import (
    equals_its_copy,
    is_saved,
    leaves_the_program_alone,
    loses_little,
    reaches_kernels,
    repeats,
    says_what_it_did,
    takes_data_in_parts,
    takes_odd_data,
)
from qompose.testing.contract import Contract, Row, report, test_of
from qompose.testing.suite import BackendSource


def _places(suite: AlgorithmSuite) -> list[Row]:
    return [(place,) for place in suite.places]


class AlgorithmContract(Contract):
    """The promises of every algorithm. Subclass it, and name the algorithm.

    Each test runs for the weights of every backend that is installed and can be used here, one operator
    and mode at a time. A test that cannot pass is overridden with a reason, `pytest.mark.xfail(reason=...)`;
    overriding or deleting one without a reason fails.

    Attributes:
        algorithm: the word of its entry point; or, if it is not installed or has options, an Algorithm or a
            function that returns one.
        backends: the backends to test with, as names or Backends; by default every installed one.
        most_lost: how many dB a product may lose, on data like the calibration data, to rounding to nearest.
    """

    algorithm: ClassVar[AlgorithmSource] = ""
    backends: ClassVar[Sequence[BackendSource]] = ()
    most_lost: ClassVar[float] = 3.0

    @classmethod
    def _make(cls) -> AlgorithmSuite:
        return AlgorithmSuite(cls._source("algorithm"), cls.backends, cls.most_lost)

    def test_loads(self) -> None:
        """The algorithm loads by its word, and there are weights that it may change."""
        report(self.suite().load)

    test_says_what_it_did = test_of(says_what_it_did, "place", _places)
    test_repeats = test_of(repeats, "place", _places)
    test_leaves_the_program_alone = test_of(leaves_the_program_alone, "place", _places)
    test_takes_data_in_parts = test_of(takes_data_in_parts, "place", _places)
    test_loses_little = test_of(loses_little, "place", _places)
    test_takes_odd_data = test_of(takes_odd_data, "place", _places)
    test_reaches_kernels = test_of(reaches_kernels, "place", _places)
    test_is_saved = test_of(is_saved, "place", _places)
    test_equals_its_copy = test_of(equals_its_copy)

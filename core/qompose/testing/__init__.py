# SPDX-License-Identifier: Apache-2.0
"""Contract suites: an author subclasses a class, names a backend or an algorithm, and runs pytest.

::

    from qompose.testing import BackendContract

    class TestMyBackend(BackendContract):
        backend = "mybackend"

The rule table makes the tests. `AlgorithmContract` does the same for an algorithm.
"""

from __future__ import annotations

try:
    import pytest as _pytest
except ImportError as error:  # pragma: no cover - the tests of this package need it
    raise ImportError(
        'qompose.testing requires pytest; install it with pip install "qompose[testing]"'
    ) from error

from qompose.testing.contracts import AlgorithmContract, BackendContract
from qompose.testing.fixtures import ContractError

__all__ = ["AlgorithmContract", "BackendContract", "ContractError"]

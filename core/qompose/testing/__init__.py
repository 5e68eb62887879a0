# SPDX-License-Identifier: Apache-2.0
"""Contract suites: an author subclasses a class and names the backend, whose rule table makes the tests.

::

    from qompose.testing import BackendContract

    class TestMyBackend(BackendContract):
        backend = "mybackend"

`AlgorithmContract` is that of an algorithm.
"""

from __future__ import annotations

try:
    import pytest as _pytest
except ImportError as error:  # pragma: no cover - the tests of this package need it
    raise ImportError(
        'qompose.testing needs pytest, which comes with an extra: pip install "qompose[testing]"'
    ) from error

from qompose.testing.algorithm_contract import AlgorithmContract
from qompose.testing.backend_contract import BackendContract
from qompose.testing.fixtures import ContractError

__all__ = ["AlgorithmContract", "BackendContract", "ContractError"]

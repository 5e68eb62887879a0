# SPDX-License-Identifier: Apache-2.0
"""The contract suite: an author subclasses one class and names the backend; its rule table makes the tests.

::

    from qompose.testing import BackendContract

    class TestMyBackend(BackendContract):
        backend = "mybackend"
"""

from __future__ import annotations

try:
    import pytest as _pytest
except ImportError as error:  # pragma: no cover - the tests of this package need it
    raise ImportError(
        'qompose.testing needs pytest, which comes with an extra: pip install "qompose[testing]"'
    ) from error

from qompose.testing.contract import BackendContract
from qompose.testing.fixtures import ContractError

__all__ = ["BackendContract", "ContractError"]

# SPDX-License-Identifier: Apache-2.0
"""What ExecuTorch and what it imports say of themselves is kept from users; what programs say is not."""

from __future__ import annotations

import logging
import warnings

import pytest
from qompose_xnnpack.executorch_target.executorch_imports import QUIET_LOGGERS, quiet


@pytest.mark.parametrize("own", [logging.NOTSET, logging.INFO, logging.CRITICAL])
@pytest.mark.parametrize("name", QUIET_LOGGERS)
def test_loggers_are_as_they_were_afterwards(name: str, own: int) -> None:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(own)
    try:
        with pytest.raises(RuntimeError), quiet():
            assert not logger.isEnabledFor(logging.WARNING)
            assert logger.isEnabledFor(logging.ERROR) == (own != logging.CRITICAL)
            raise RuntimeError
        assert logger.level == own
    finally:
        logger.setLevel(before)


def test_other_loggers_and_warnings_are_heard() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with quiet():
            assert logging.getLogger("mine").isEnabledFor(logging.WARNING)
            warnings.warn("read_text is deprecated", DeprecationWarning, stacklevel=1)
            warnings.warn("something else", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in said] == ["something else"]

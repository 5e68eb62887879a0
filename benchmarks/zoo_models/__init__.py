# SPDX-License-Identifier: Apache-2.0
"""What `zoo.py` measures: the zoo of the tests, and as many models more that no test runs."""

from __future__ import annotations

from tests.zoo import ZOO
from tests.zoo.entry import ZooModel

from . import places, rows, tables, transformers, vision

EVERY: tuple[ZooModel, ...] = (
    *ZOO,
    *vision.MODELS,
    *places.MODELS,
    *rows.MODELS,
    *tables.MODELS,
    *transformers.MODELS,
)

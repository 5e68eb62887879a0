# SPDX-License-Identifier: Apache-2.0
"""qompose's algorithms keep the contract of every algorithm, on the weights of all our backends."""

from __future__ import annotations

import pytest
from qompose.algorithms import SignRound
from qompose.testing import AlgorithmContract

pytestmark = pytest.mark.full


class TestEqualization(AlgorithmContract):
    algorithm = "equalization"


class TestSmoothQuant(AlgorithmContract):
    algorithm = "smooth_quant"


class TestAWQ(AlgorithmContract):
    algorithm = "awq"


class TestScaleSearch(AlgorithmContract):
    algorithm = "scale_search"


class TestGPTQ(AlgorithmContract):
    algorithm = "gptq"


class TestSequentialGPTQ(AlgorithmContract):
    algorithm = "gptq_sequential"


class TestSignRound(AlgorithmContract):
    algorithm = SignRound(iterations=12)


class TestBiasCorrection(AlgorithmContract):
    algorithm = "bias_correction"

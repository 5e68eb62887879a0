# SPDX-License-Identifier: Apache-2.0
from qompose.testing import BackendContract


class TestContract(BackendContract):
    backend = "toy_backend"

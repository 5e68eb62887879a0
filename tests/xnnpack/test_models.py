# SPDX-License-Identifier: Apache-2.0
"""Whole networks in static int8, on the runtime and in process, held against their Q/DQ models.

Rounding feeds on itself: where one value in 10^5 rounds the other way, each reader has it in hundreds of
sums, some of which now round the other way too. With random weights twenty layers make that two values of
three, however alike the operators compute. So a network is held to the Q/DQ model operator by operator,
each on the integers of the Q/DQ model; its output, to the distance that rounding has put between the
Q/DQ model and the float one, and with trained weights to the bound of the operators.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, sqnr_db
from qompose.graph import tag_of
from qompose.plan import record_of
from qompose_xnnpack import ExecutorchProgram, XNNPACKQuantizer, get_symmetric_quantization_config
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

# SPDX-License-Identifier: Apache-2.0
"""Reports and comparisons made by hand, for tests of pages."""

from __future__ import annotations

import math
from typing import Any

from qompose.reporting.report_data import (
    FLOAT,
    KERNEL,
    SIMULATED,
    Compared,
    Comparison,
    Counts,
    Report,
    Row,
)

EVIL = "</script><script>alert(1)</script><!-- <b> & \" '"


def row(name: str, *inputs: str, **facts: Any) -> Row:
    """A row of a kernel of `one`, unless the facts say otherwise."""
    usual = {
        "operator": "aten.linear", "module": "", "macs": 0, "state": KERNEL, "owner": "one",
        "rule": "linear", "config": "static", "kernel": "product", "region": sum(map(ord, name)),
    }  # fmt: skip
    return Row(name=name, inputs=inputs, **{**usual, **facts})


def in_float(name: str, *inputs: str, **facts: Any) -> Row:
    nothing = {"owner": "", "rule": "", "config": "", "kernel": "", "reason": "no rule claims it"}
    return row(name, *inputs, **{**nothing, "state": FLOAT, **facts})


ROWS = (
    row("first", module="body.0.a", macs=600),
    row("second", "first", module="body.0.b", macs=100, owner="two"),
    row(
        "third", "second", module="body.1", macs=200, state=SIMULATED, kernel="", reason="no kernel"
    ),
    row("sum", "first", "third", module="body.1", operator="aten.add.Tensor"),
    in_float("last", "sum", operator="aten.tanh", macs=100),
)


def report(*rows: Row, **facts: Any) -> Report:
    usual: dict[str, Any] = {
        "stage": "lowered", "target": "torch", "rows": rows or ROWS, "counts": Counts(kernels=3),
        "requantizations": (), "conflicts": (), "rewrites": (), "notes": (),
        "bytes_before": 100, "bytes_after": 30,
    }  # fmt: skip
    return Report(**{**usual, **facts})


def compared(name: str, sqnr: float, own_sqnr: float | None = None, **facts: Any) -> Compared:
    usual: dict[str, Any] = {
        "value": f"value of {name}", "module": "", "operator": "aten.linear", "state": KERNEL,
        "owner": "one", "relative_error": 0.1, "steps": None, "clipping": None, "range_use": None,
        "cause": "rounding",
    }  # fmt: skip
    return Compared(name=name, sqnr=sqnr, own_sqnr=own_sqnr, **{**usual, **facts})


COMPARED = (
    compared("third", 21.5, 24.25, cause="clipping"),
    compared("first", 45.0, 45.0),
    compared("second", math.inf, math.inf, cause="equal"),
    compared("", 50.0, value="head.weight", operator="parameter"),
    compared("third", 33.0),
)


def comparison(*rows: Compared, **facts: Any) -> Comparison:
    usual: dict[str, Any] = {
        "reference": "float", "other": "lowered", "rows": rows or COMPARED, "unpaired": (),
        "notes": (), "batches": 4,
    }  # fmt: skip
    return Comparison(**{**usual, **facts})

# SPDX-License-Identifier: Apache-2.0
"""Plans as text that is reviewed: `pytest --regen` writes them anew, and the diff says what changed."""

from __future__ import annotations

from pathlib import Path

import qompose
from torch.fx import GraphModule

FOLDER = Path(__file__).parent / "plans"


def assert_golden(name: str, model: GraphModule, *, regen: bool) -> None:
    """The plan of a prepared model is the one that is on file under `name`."""
    plan = model.meta["qompose"].plan
    assert isinstance(plan, qompose.plan.Plan)
    path, text = FOLDER / f"{name}.txt", f"{plan}\n"
    if regen:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"{path.name} differs; see pytest --regen"

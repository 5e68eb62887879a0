# SPDX-License-Identifier: Apache-2.0
"""Default configurations decide the same, to the bit, by data in processes, files of parts, or a loop."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.calibration.test_collecting import eighths, exact
from tests.core.calibration.test_ranks import together
from tests.core.toy import Model, export, graph_text, randn
from tests.products import x86, xnnpack

QUANTIZERS = {"xnnpack": lambda: xnnpack(is_per_channel=False), "x86_inductor": x86}
# Each process decides by its share, and by parts of its own, of which the last process has none.
BODY = """
from tests.composed.test_calibrating_apart import QUANTIZERS, batches, outcome, prepared

for backend in QUANTIZERS:
    own = batches(5)[rank::3] if rank < 3 else []
    for data, options in (batches(3), {}), (own, {"sharded": True}):
        model = qompose.calibrate(prepared(backend), data, **options)
        Path(f"{out}/{backend}.{len(options)}.{rank}").write_text(outcome(model))
"""


def net() -> nn.Module:
    """A loud channel behind a layer norm, and of `z` a loud one that nobody reads.

    Parameters are few bits long: all sums are exact, and batches of any size give the same last bits.
    """
    sizes = {"up": (16, 48), "down": (48, 16), "read": (16, 8)}
    parts: dict[str, Any] = {name: nn.Linear(*size) for name, size in sizes.items()}
    norm = parts["norm"] = nn.LayerNorm(16, eps=0.0)
    model = Model(lambda m, x, z: (m.down(m.up(m.norm(x)).relu()), m.read(z)), **parts)
    exact(model)
    norm.weight.data[3], parts["read"].weight.data[:, 3] = 24.0, 0.0
    return model


def batches(size: int, examples: slice = slice(None)) -> list[tuple[Tensor, Tensor]]:
    signs = randn(96, 5, 8).sign()
    x, z = torch.cat([signs, -signs], -1), eighths(randn(96, 5, 16))
    z[::7, 2, 3] = 600.0
    return [*zip(x[examples].split(size), z[examples].split(size), strict=True)]


def prepared(backend: str) -> GraphModule:
    batch = {0: torch.export.Dim("batch")}
    program = export(net(), *batches(4)[0], dynamic_shapes=(batch, batch))
    return qompose.prepare_pt2e(program, QUANTIZERS[backend]())


def outcome(model: GraphModule) -> str:
    """What was seen and all that is decided: scales are in the graph, factors and integers in parameters."""
    converted, seen = qompose.convert_pt2e(model), qompose.statistics(model)
    with TemporaryDirectory() as folder:
        seen.save(path := Path(folder) / "seen.json")
        state = [f"{name} {value.tolist()}" for name, value in converted.state_dict().items()]
        rewrites = qompose.report(converted).rewrites
        return "\n".join([graph_text(converted), *state, *rewrites, path.read_text()])


def difference(one: str, other: str) -> tuple[str, str] | None:
    """The first line that differs: pytest takes minutes to compare such texts."""
    pairs = zip_longest(one.splitlines(), other.splitlines(), fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


@cache
def looped(backend: str) -> str:
    model = prepared(backend)
    for batch in reversed(batches(7)):
        model(*batch)
    decided = outcome(model)
    for word in ("smooth_quant on", "gptq on", "bias_correction on", "range of z"):
        assert any(line.startswith(word) for line in decided.splitlines()), word
    return decided


@pytest.mark.full
def test_processes_decide_what_a_loop_decides(tmp_path: Path) -> None:
    done = together(tmp_path, BODY)
    assert not any(process.returncode for process in done), done[0].stderr
    for backend in QUANTIZERS:
        found = [path.read_text() for path in tmp_path.glob(f"{backend}.*")]
        assert [difference(text, looped(backend)) for text in found] == [None] * 8


@pytest.mark.parametrize("backend", QUANTIZERS)
def test_files_of_parts_decide_what_a_loop_decides(backend: str, tmp_path: Path) -> None:
    found = []
    for first, last in pairwise((0, 3, 50, 51, 96)):
        part = qompose.calibrate(prepared(backend), batches(4, slice(first, last)))
        path = tmp_path / f"{first}.{'json' if first % 2 else 'safetensors'}"
        qompose.statistics(part).save(path)
        found.insert(0, qompose.Statistics.load(path))
    merged = found[0].merged(*found[1:])
    decided = outcome(merged.apply(prepared(backend)))
    assert difference(decided, looped(backend)) is None

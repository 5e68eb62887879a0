# SPDX-License-Identifier: Apache-2.0
"""Default configurations decide the same, bit by bit, however the data came: by processes, files or a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.calibration.test_ranks import together
from tests.core.toy import Model, export, graph_text, randn
from tests.products import x86, xnnpack

QUANTIZERS = {"xnnpack": lambda: xnnpack(is_per_channel=False), "x86_inductor": x86}
DECIDED = ("smooth_quant of", "gptq of", "bias_correction of", "range of z")
PROCESSES = 4


def net() -> nn.Module:
    """A block whose parameters are small multiples of powers of two, so that all sums are exact.

    Else a batch of another size gives other last bits. The layer norm has a loud channel, and of `z` nobody
    reads the channel with the large values.
    """
    norm, up, down, read = (
        nn.LayerNorm(16, eps=0.0), nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 8),
    )  # fmt: skip
    for number, layer in enumerate((up, down, read)):
        for parameter in layer.parameters():
            parameter.data = (randn(*parameter.shape, seed=number) * 16).round() / 64
    norm.weight.data[3], read.weight.data[:, 3] = 16.0, 0.0
    up.weight.data[:, 3] = (up.weight.data[:, 3] * 4).round() / 64
    parts = {"norm": norm, "up": up, "down": down, "read": read}
    return Model(lambda m, x, z: (m.down(m.up(m.norm(x)).relu()), m.read(z)), **parts)


def batches(size: int, examples: slice = slice(None)) -> list[tuple[Tensor, Tensor]]:
    signs = randn(96, 5, 8).sign()
    x, z = torch.cat([signs, -signs], -1), (randn(96, 5, 16) * 16).round() / 16
    z[::7, 2, 3] = 600.0
    return [*zip(x[examples].split(size), z[examples].split(size), strict=True)]


def prepared(backend: str) -> GraphModule:
    batch = {0: torch.export.Dim("batch")}
    program = export(net(), *batches(4)[0], dynamic_shapes=(batch, batch))
    return qompose.prepare_pt2e(program, QUANTIZERS[backend]())


def outcome(model: GraphModule) -> dict[str, Any]:
    """All that conversion decides: scales stand in the graph, factors and integers in the parameters."""
    converted = qompose.convert_pt2e(model)
    state = {name: value.tolist() for name, value in converted.state_dict().items()}
    lines = [*qompose.report(converted).rewrites]
    return {"graph": graph_text(converted), "rewrites": lines, "state": state}


BODY = f"""
from tests.composed.test_calibrating_apart import QUANTIZERS, batches, outcome, prepared

for backend in QUANTIZERS:
    for data, options in (
        (batches(3), {{}}),
        # The last one has no data.
        (batches(5)[rank :: count - 1] if rank < count - 1 else [], {{"sharded": True}}),
    ):
        path = f"{{out}}/{{backend}}.{{len(options)}}.{{rank}}"
        model = qompose.calibrate(prepared(backend), data, **options)
        qompose.statistics(model).save(path + ".json")
        Path(path + ".outcome").write_text(json.dumps(outcome(model)))
"""


def looped(backend: str) -> GraphModule:
    model = prepared(backend)
    for batch in reversed(batches(7)):
        model(*batch)
    return model


def test_processes_decide_what_a_loop_decides(tmp_path: Path) -> None:
    done = together(tmp_path, BODY, count=PROCESSES)
    assert not any(process.returncode for process in done), done[0].stderr
    for backend in QUANTIZERS:
        model = looped(backend)
        qompose.statistics(model).save(tmp_path / "alone.json")
        alone = outcome(model)
        assert all(any(word in line for line in alone["rewrites"]) for word in DECIDED)
        files = sorted(tmp_path.glob(f"{backend}.*.json"))
        assert len(files) == 2 * PROCESSES
        for path in files:
            assert path.read_bytes() == (tmp_path / "alone.json").read_bytes(), path.name
            assert json.loads(path.with_suffix(".outcome").read_text()) == alone, path.name


@pytest.mark.parametrize("backend", QUANTIZERS)
def test_files_of_parts_decide_what_a_loop_decides(backend: str, tmp_path: Path) -> None:
    cuts = [slice(0, 3), slice(3, 50), slice(50, 51), slice(51, 96)]
    paths = [tmp_path / f"{n}.{('json', 'safetensors')[n % 2]}" for n in range(len(cuts))]
    for cut, path in zip(cuts, paths, strict=True):
        qompose.statistics(qompose.calibrate(prepared(backend), batches(4, cut))).save(path)
    one, *others = map(qompose.Statistics.load, reversed(paths))
    model = one.merged(*others).apply(prepared(backend))
    assert outcome(model) == outcome(looped(backend))

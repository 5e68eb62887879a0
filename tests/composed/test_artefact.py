# SPDX-License-Identifier: Apache-2.0
"""Saved models of the real plugins, loaded by a process that imports only qompose."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from tests.composed.test_composition import scores, tagger
from tests.processes import python
from tests.sampling import at_once


def ids(batch: int) -> Tensor:
    return torch.randint(30, (batch, 5), generator=torch.Generator().manual_seed(batch))


SCALE = torch.tensor(2.0)


def converted(*members: Any) -> GraphModule:
    model = tagger(lambda m, ids, *, scale: {"scores": scores(m, ids) * scale})
    shapes = {"ids": {0: Dim("batch", min=2, max=64)}, "scale": None}
    program = torch.export.export(model, (ids(6),), {"scale": SCALE}, dynamic_shapes=shapes)
    prepared = qompose.prepare_pt2e(program, qompose.compose(*members))
    for batch in (6, 9):
        prepared(ids(batch), scale=SCALE)
    return qompose.convert_pt2e(prepared)


FRESH = """
import json, sys
def hook(event, arguments):
    if event == "pickle.find_class" and watching:
        raise SystemExit(f"{event} {arguments}")
watching = True
import qompose
from safetensors.torch import load_file
given = load_file(sys.argv[2])
sys.addaudithook(hook)
loaded = qompose.load(sys.argv[1])
watching = False
import torch
imported = {name.partition(".")[0] for name in sys.modules if name.startswith("qompose_")}
asked = {f"qompose_{owner}" for owner in loaded.meta["qompose"].requirements}
assert imported == asked, imported
def check(model, which):
    for batch in (3, 64):
        scores = model(given[f"ids{batch}"], scale=given["scale"])["scores"]
        assert torch.equal(scores, given[f"{which}{batch}"]), (which, batch)
check(loaded, "converted")
lowered = qompose.lower(loaded)
check(lowered, "lowered")
kernels = {str(n): k for n, k in lowered.meta["qompose"].kernels.items()}
print(json.dumps({"report": qompose.report(loaded).to_dict(), "kernels": kernels}))
"""


def fresh(saved: GraphModule, folder: Path) -> dict[str, Any]:
    """Save a model, and load, run and lower it in another process, comparing bits; what that found."""
    qompose.save(saved, folder / "model")
    tensors = {"scale": SCALE}
    for which, model in (("converted", saved), ("lowered", qompose.lower(saved))):
        for batch in (3, 64):
            tensors[f"ids{batch}"] = ids(batch)
            scores = model(ids(batch), scale=SCALE)["scores"]
            tensors[f"{which}{batch}"] = scores.detach().contiguous()
    save_file(tensors, folder / "given")
    result: dict[str, Any] = json.loads(python("-c", FRESH, "model", "given", cwd=folder))
    return result


@pytest.mark.parametrize("product", at_once(("xnnpack", "x86_inductor"), "x86_inductor"))
def test_a_fresh_process_runs_reports_and_lowers_alike(product: str, tmp_path: Path) -> None:
    saved = converted("embedding", product)
    found = fresh(saved, tmp_path)
    lowered = qompose.lower(saved)
    assert found["report"] == json.loads(qompose.report(saved).to_json())
    kernels = lowered.meta["qompose"].kernels
    assert len(kernels) >= 3
    assert found["kernels"] == {str(number): kernel for number, kernel in kernels.items()}


@pytest.mark.full
@pytest.mark.skipif(not find_spec("executorch"), reason="needs executorch")
@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own
def test_the_executorch_target(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    batches = {n: torch.randn(n, 16) for n in (3, 6, 64)}
    shapes = {"input": {0: Dim("batch", min=2, max=64)}}
    program = torch.export.export(model, (batches[6],), dynamic_shapes=shapes)
    prepared = qompose.prepare_pt2e(program, qompose.compose("xnnpack"))
    prepared(batches[6])
    saved = qompose.convert_pt2e(prepared)
    lowered = qompose.lower(saved, "executorch")
    qompose.save(lowered, tmp_path / "model")  # which is lowered as a converted one is
    loaded = qompose.load(tmp_path / "model")
    record, other = (program.meta["qompose"] for program in (lowered, loaded))
    assert record.kernels
    assert (other.kernels, other.fallbacks) == (record.kernels, record.fallbacks)
    for x in batches.values():
        assert torch.equal(lowered(x), loaded(x))
    methods = qompose.lower({"one": saved, "two": saved}, "executorch")
    qompose.save(methods, tmp_path / "methods")
    again = qompose.load(tmp_path / "methods")
    assert sorted(again.methods) == ["one", "two"]
    assert torch.equal(again.methods["two"].run(batches[3]), lowered(batches[3]))

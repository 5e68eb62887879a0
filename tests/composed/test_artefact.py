# SPDX-License-Identifier: Apache-2.0
"""Saved models of the real plugins, loaded by a process that imports only qompose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from importlib_metadata import version
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, ids: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"scores": self.head(self.body(self.table(ids))) * scale}


def ids(batch: int) -> Tensor:
    return torch.randint(30, (batch, 5), generator=torch.Generator().manual_seed(batch))


SCALE = torch.tensor(2.0)


def tagger(*members: Any) -> GraphModule:
    shapes = {"ids": {0: Dim("batch", min=2, max=64)}, "scale": None}
    program = torch.export.export(
        Tagger().eval(), (ids(6),), {"scale": SCALE}, dynamic_shapes=shapes
    )
    prepared = qompose.prepare_pt2e(program, qompose.compose(*members))
    for batch in (6, 9):
        prepared(ids(batch), scale=SCALE)
    return qompose.convert_pt2e(prepared)


PRESENT = [info.name for info in qompose.backends()]

FRESH = """
import json, sys
def hook(event, arguments):
    if event == "pickle.find_class" and watching:
        raise SystemExit(f"{event} {arguments}")
watching = True
import qompose
from qompose import plugins
from safetensors.torch import load_file
offered = plugins.entry_points
plugins.entry_points = lambda group: [p for p in offered(group) if p.name not in sys.argv[3:]]
given = load_file(sys.argv[2])
hidden = {f"qompose_{owner}" for owner in sys.argv[3:]}
sys.addaudithook(hook)
loaded = qompose.load(sys.argv[1])
watching = False
import torch
imported = {name.partition(".")[0] for name in sys.modules if name.startswith("qompose_")}
asked = {f"qompose_{owner}" for owner in loaded.meta["qompose"].requirements}
assert imported == asked - hidden, imported
def check(model, which):
    for batch in (3, 64):
        scores = model(given[f"ids{batch}"], scale=given["scale"])["scores"]
        assert torch.equal(scores, given[f"{which}{batch}"]), (which, batch)
check(loaded, "converted")
result = {"report": qompose.report(loaded).to_dict(), "error": ""}
try:
    lowered = qompose.lower(loaded)
    check(lowered, "lowered")
    result["kernels"] = {str(n): k for n, k in lowered.meta["qompose"].kernels.items()}
except qompose.UserError as error:
    result["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(result))
"""


def fresh(saved: GraphModule, folder: Path, *absent: str, plugins: str = "") -> dict[str, Any]:
    """Save a model, and load, run and lower it in another process, comparing bits; what that found.

    Backends that are `absent` are not installed there; `plugins` is its QOMPOSE_PLUGINS.
    """
    qompose.save(saved, folder / "model")
    tensors = {"scale": SCALE}
    for which, model in (("converted", saved), ("lowered", qompose.lower(saved))):
        for batch in (3, 64):
            tensors[f"ids{batch}"] = ids(batch)
            scores = model(ids(batch), scale=SCALE)["scores"]
            tensors[f"{which}{batch}"] = scores.detach().contiguous()
    save_file(tensors, folder / "given")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, folder / "model", folder / "given", *absent],
        capture_output=True, text=True, check=False, cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "QOMPOSE_PLUGINS"}
        | ({"QOMPOSE_PLUGINS": plugins} if plugins else {}),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def as_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("product", ["xnnpack", "x86_inductor"])
def test_a_fresh_process_runs_reports_and_lowers_alike(product: str, tmp_path: Path) -> None:
    saved = tagger("embedding", product)
    found = fresh(saved, tmp_path)
    lowered = qompose.lower(saved)
    assert found["error"] == ""
    assert found["report"] == as_json(qompose.report(saved).to_dict())
    kernels = lowered.meta["qompose"].kernels
    assert len(kernels) >= 3
    assert found["kernels"] == {str(number): kernel for number, kernel in kernels.items()}


def test_a_missing_plugin_is_named_when_its_kernels_are_wanted(tmp_path: Path) -> None:
    saved = tagger("embedding", "xnnpack")
    found = fresh(saved, tmp_path, "xnnpack", "x86_inductor")
    assert found["report"] == as_json(qompose.report(saved).to_dict())
    release = version("qompose-xnnpack")
    assert found["error"].startswith("MissingBackendError")
    for part in ("'xnnpack'", f"qompose-xnnpack {release}", "pip install", "Installed: embedding"):
        assert part in found["error"]


def test_no_plugin_at_all(tmp_path: Path) -> None:
    found = fresh(tagger("embedding", "x86_inductor"), tmp_path, *PRESENT)
    assert "pip install" in found["error"]


def test_a_plugin_that_is_hidden_is_not_to_be_installed(tmp_path: Path) -> None:
    found = fresh(tagger("embedding", "xnnpack"), tmp_path, plugins="embedding")
    assert found["error"].startswith("ExcludedBackendError")
    assert "add 'xnnpack' to QOMPOSE_PLUGINS" in found["error"]


def test_one_backend_twice(tmp_path: Path) -> None:
    from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config

    config = get_symmetric_quantization_config(is_per_channel=True)
    first = XNNPACKQuantizer().set_module_name("head", config)
    saved = tagger("embedding", first, "xnnpack")
    found = fresh(saved, tmp_path)
    assert found["error"] == ""
    owners = {row["owner"] for row in found["report"]["rows"]}
    assert len([owner for owner in owners if owner.startswith("xnnpack")]) == 2


@pytest.mark.skipif(not find_spec("executorch"), reason="needs executorch")
@pytest.mark.filterwarnings("ignore")  # ExecuTorch's own
def test_the_executorch_target(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    batches = {n: torch.randn(n, 16) for n in (3, 6, 64)}
    shapes = {"input": {0: Dim("batch", min=2, max=64)}}
    program = torch.export.export(model, (batches[6],), dynamic_shapes=shapes)
    prepared = qompose.prepare_pt2e(program, qompose.compose("xnnpack"))
    prepared(batches[6])
    saved = qompose.convert_pt2e(prepared)
    qompose.save(saved, tmp_path / "model")
    loaded = qompose.load(tmp_path / "model")
    lowered = [qompose.lower(which, "executorch") for which in (saved, loaded)]
    records = [program.meta["qompose"] for program in lowered]
    assert records[0].kernels == records[1].kernels and records[0].kernels
    assert records[0].fallbacks == records[1].fallbacks
    for x in batches.values():
        assert torch.equal(lowered[0](x), lowered[1](x))

# SPDX-License-Identifier: Apache-2.0
"""A saved model comes back as it was, in a process that knows nothing of it, and no file runs code."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.backend import discovery
from qompose.errors import ExcludedBackendError, MissingBackendError
from qompose.program.call_signature import call_signature
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from tests.core.offering import offered_by_a_package
from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.toy import (
    INT8,
    LINEAR,
    VIEW,
    Annotator,
    NullQuantizer,
    ToyBackend,
    annotate,
    aten,
    convert,
    export,
    graph_text,
    prepare,
    randn,
    seeded,
    toy,
)
from tests.sampling import at_once
from tests.zoo import ZOO, ZooModel, by_name

ROOT = Path(__file__).parents[3]
KINDS = {
    "mlp", "tied_language_model", "key_cache", "nested_inputs", "optional_outputs", "constants",
    "integers_only", "weight_of_two_names", "weight_in_buffer", "bfloat16_conv_bn",
    "cond_one_without_weights", "loop", "scan_cell", "map_rows", "no_grad_region", "autocast",
    "spectrum_mixer", "lstm",
}  # fmt: skip
"""Models of every kind of program; the others are more of these."""
LOOPS = ("loop", "scan_cell", "map_rows")
"""With gradients their export takes seconds."""
MODELS = [m for m in ZOO if "transformers" not in m.tags or find_spec("transformers")]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        y = self.second(self.first(x).view(-1, 16))
        return y if shift is None else y + shift


X = randn(6, 8)


@pytest.fixture
def offered() -> Iterator[None]:
    """The toy backend as a distribution would offer it."""
    with offered_by_a_package(ToyBackend):
        yield


@cache
def mlp_program() -> torch.export.ExportedProgram:
    return export(seeded(MLP()), X)


def mlp(*rules: Any) -> GraphModule:
    return convert(mlp_program(), toy(*(rules or (LINEAR, VIEW))), X)


@cache
def mlp_file() -> bytes:
    """What `save` writes of it."""
    with tempfile.TemporaryDirectory() as folder:
        qompose.save(mlp(), Path(folder, "model.qompose"))
        return Path(folder, "model.qompose").read_bytes()


def stored(model: GraphModule, path: Path) -> GraphModule:
    qompose.save(model, path)
    return qompose.load(path)


def unquantized(module: nn.Module, *inputs: Any, **options: Any) -> GraphModule:
    """Through the stages without a claim."""
    program = torch.export.export(module.eval(), inputs, **options)
    return qompose.convert_pt2e(prepare(program, NullQuantizer()))


def assert_same_model(loaded: GraphModule, saved: GraphModule) -> None:
    assert graph_text(loaded) == graph_text(saved)
    for one, other in zip(loaded.graph.nodes, saved.graph.nodes, strict=True):
        assert one.name == other.name
        assert one.kwargs == other.kwargs
        assert _example(one) == _example(other)
        assert one.meta.get("custom") == (other.meta.get("custom") or None)
        assert bool(one.meta.get("nn_module_stack")) == bool(other.meta.get("nn_module_stack"))
    assert qompose.report(loaded) == qompose.report(saved)
    plans = [module.meta["qompose"].plan.to_dict() for module in (loaded, saved)]
    assert plans[0] == plans[1]
    parameters = [[n for n, _ in m.named_parameters()] for m in (loaded, saved)]
    assert parameters[0] == parameters[1]
    assert str(call_signature(loaded)) == str(call_signature(saved))


def _example(node: torch.fx.Node) -> Any:
    def describe(value: Any) -> str:
        if not isinstance(value, Tensor):
            return str(value)
        facts = value.dtype, value.device, [*value.shape], value.stride(), value.requires_grad
        return str(facts)

    return pytree.tree_map(describe, node.meta.get("val"))


@pytest.mark.parametrize("model", at_once(MODELS, *map(by_name, KINDS)), ids=str)
def test_every_model_of_the_zoo_comes_back(model: ZooModel, path: Path) -> None:
    with torch.set_grad_enabled(model.name not in LOOPS):
        program = model.export(dynamic=model.dynamic_shapes is not None)
    saved = qompose.convert_pt2e(prepare(program, NullQuantizer()))
    inputs = model.inputs()
    loaded = stored(saved, path)
    assert_same_model(loaded, saved)
    with torch.no_grad():
        assert_same_outputs(saved(*inputs), loaded(*inputs))


QUICK = ("mlp", "tied_language_model", "branches", "lstm", "bn_conv_skip")


@pytest.mark.parametrize("name", at_once([*QUICK, "lenet", "vision_transformer"], *QUICK))
def test_quantized_models_come_back_and_lower_alike(name: str, path: Path, offered: None) -> None:
    model, inputs = by_name(name), by_name(name).inputs()
    prepared = prepare(model.export(), toy())
    with torch.no_grad():
        prepared(*inputs)
    saved = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    loaded = stored(saved, path)
    assert_same_model(loaded, saved)
    with torch.no_grad():
        assert_same_outputs(saved(*inputs), loaded(*inputs))
    assert_lower_alike(loaded, saved, inputs)


def assert_lower_alike(loaded: GraphModule, saved: GraphModule, inputs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)  # rules without kernels
        lowered = [qompose.lower(model) for model in (loaded, saved)]
    assert graph_text(lowered[0]) == graph_text(lowered[1])
    records = [model.meta["qompose"] for model in lowered]
    assert records[0].kernels == records[1].kernels
    assert records[0].fallbacks == records[1].fallbacks
    assert qompose.report(lowered[0]) == qompose.report(lowered[1])
    with torch.no_grad():
        assert_same_outputs(lowered[0](*inputs), lowered[1](*inputs))


class TestBackends:
    """Backends are loaded when `lower` asks, and missed only then."""

    def test_lowering(self, path: Path, offered: None) -> None:
        saved = mlp()
        loaded = stored(saved, path)
        assert discovery._load.cache_info().currsize == 0
        assert_same_model(loaded, saved)
        assert_lower_alike(loaded, saved, (X,))
        assert discovery._load.cache_info().currsize == 1

    def test_a_missing_one(
        self, path: Path, offered: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved = mlp()
        qompose.save(saved, path)
        monkeypatch.setattr(discovery, "entry_points", lambda group: [])
        loaded = qompose.load(path)
        assert torch.equal(loaded(X), saved(X))
        assert qompose.report(loaded) == qompose.report(saved)
        with pytest.raises(MissingBackendError, match=r"toy-package==1\.2") as caught:
            qompose.lower(loaded)
        assert caught.value.name == "toy"

    def test_one_that_the_environment_excludes(
        self, path: Path, offered: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is installed: to install it is not what helps."""
        loaded = stored(mlp(), path)
        monkeypatch.setenv("QOMPOSE_PLUGINS", "other")
        with pytest.raises(ExcludedBackendError, match="QOMPOSE_PLUGINS='other'") as caught:
            qompose.lower(loaded)
        assert caught.value.name == "toy"

    def test_one_of_no_package(self, path: Path) -> None:
        with pytest.raises(MissingBackendError) as caught:
            qompose.lower(stored(mlp(), path))
        assert caught.value.name == "toy"

    def test_one_that_claims_nothing_is_not_missed(
        self, path: Path, offered: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        idle = toy(LINEAR, config=None, name="idle")
        saved = convert(mlp_program(), qompose.compose(toy(LINEAR), idle), X)
        loaded = stored(saved, path)
        assert set(loaded.meta["qompose"].backends) == {"toy"}
        assert_lower_alike(loaded, saved, (X,))

    def test_one_that_occurs_twice(self, path: Path, offered: None) -> None:
        first = toy(LINEAR).set_module_name("second", None)
        saved = convert(mlp_program(), qompose.compose(first, toy(LINEAR, VIEW)), X)
        owners = {row.owner for row in qompose.report(saved).rows} - {""}
        assert len(owners) == 2 and any("#2" in owner for owner in owners)
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        assert_lower_alike(loaded, saved, (X,))

    def test_one_that_annotates_still_only_annotates(self, path: Path) -> None:
        def only_linear(node: torch.fx.Node) -> None:
            if node.target == aten.linear.default:
                annotate(node, {node.args[0]: INT8})  # type: ignore[dict-item]

        saved = convert(mlp_program(), Annotator(only_linear), X)
        loaded = stored(saved, path)
        assert_same_model(loaded, saved)
        assert torch.equal(loaded(X), saved(X))
        with pytest.raises(qompose.errors.TargetError, match="annotator"):
            qompose.lower(loaded)

    def test_specifications_keep_their_facts_without_factories(self, path: Path) -> None:
        spec = stored(mlp(), path).meta["qompose"].plan.claims[0].specs[0].spec
        assert spec.dtype is torch.int8
        with pytest.raises(qompose.UserError, match="MinMaxObserver"):
            spec.observer_or_fake_quant_ctr()

    def test_a_loaded_model_can_be_saved_again(self, path: Path, offered: None) -> None:
        qompose.save(mlp(), path)
        written = path.read_bytes()
        qompose.save(qompose.load(path), path)
        assert path.read_bytes() == written


PLUGIN = """
import qompose
@qompose.backend.hookimpl
def qompose_backend():
    from tests.core.toy import ToyBackend
    return ToyBackend()
"""
FRESH = """
import sys
def hook(event, arguments):
    if event in ("pickle.find_class", "os.system", "subprocess.Popen"):
        raise SystemExit(f"{event} {arguments}")
import qompose
from safetensors.torch import load_file
sys.addaudithook(hook)
given = load_file(sys.argv[2])
loaded = qompose.load(sys.argv[1])
import torch
assert torch.equal(loaded(given["x"]), given["y"])
assert not [name for name in sys.modules if name.startswith(("tests", "toy_plugin", "qompose_"))]
print(qompose.report(loaded).to_markdown())
lowered = qompose.lower(loaded)
assert torch.equal(lowered(given["x"]), given["z"])
assert "toy_plugin" in sys.modules
"""


def test_a_fresh_process(path: Path, tmp_path: Path, offered: None) -> None:
    """It imports qompose alone; whatever finds a class for a pickle ends it."""
    saved = mlp()
    qompose.save(saved, path)
    lowered = qompose.lower(saved)
    save_file({"x": X, "y": saved(X).detach(), "z": lowered(X).detach()}, tmp_path / "given")
    info = tmp_path / "toy_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[qompose]\ntoy = toy_plugin\n")
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    paths = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("QOMPOSE_PLUGINS", None)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, path, tmp_path / "given"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == qompose.report(saved).to_markdown().strip()

# SPDX-License-Identifier: Apache-2.0
"""A saved model comes back as it was, in a process that knows nothing of it, and no file runs code."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.backend import Rule, discovery
from qompose.errors import (
    ArtefactError,
    ExcludedBackendError,
    MissingBackendError,
    PluginError,
    RequirementError,
    RequirementWarning,
    StageError,
)
from qompose.plan.plan import attach
from qompose.program import disk
from qompose.program.call_signature import call_signature
from qompose.storage import artifact
from qompose.storage.artifact import read
from safetensors import safe_open
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
    Model,
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
from tests.processes import END_AT_ONCE
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


def layers(m: Any, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
    y = m.second(m.first(x).view(-1, 16))
    return y if shift is None else y + shift


def net(function: Any = layers, **buffers: Tensor) -> nn.Module:
    """A function of two layers and of buffers."""
    parts = {"first": nn.Linear(8, 16), "second": nn.Linear(16, 4), **buffers}
    return seeded(Model(function, **parts))


X = randn(6, 8)


class Offered:
    """The toy backend as a package offers it, and what a test makes of it."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.rules: tuple[Rule, ...] | None = None

    def make(self) -> ToyBackend:
        backend = ToyBackend(**self.facts)
        if self.rules is not None:
            backend.rules = self.rules
        return backend

    def forget(self) -> None:
        """Load it anew, as another process would."""
        discovery._load.cache_clear()


@pytest.fixture
def offered() -> Iterator[Offered]:
    found = Offered()
    with offered_by_a_package(found.make):
        yield found


@cache
def mlp_program() -> torch.export.ExportedProgram:
    return export(net(), X)


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
def test_quantized_models_come_back_and_lower_alike(
    name: str, path: Path, offered: Offered
) -> None:
    model, inputs = by_name(name), by_name(name).inputs()
    prepared = prepare(model.export(), toy())
    with torch.no_grad():
        prepared(*inputs)
    saved = qompose.convert_pt2e(prepared, allow_uncalibrated=True)
    loaded = stored(saved, path)
    assert_same_model(loaded, saved)
    with torch.no_grad():
        assert_same_outputs(saved(*inputs), loaded(*inputs))
    assert discovery._load.cache_info().currsize == 0
    assert_lower_alike(loaded, saved, inputs)
    assert discovery._load.cache_info().currsize == 1


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

    def test_a_missing_one(
        self, path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch
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
        self, path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch
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

    def test_one_that_claims_nothing_is_not_missed(self, path: Path, offered: Offered) -> None:
        idle = toy(LINEAR, config=None, name="idle")
        saved = convert(mlp_program(), qompose.compose(toy(LINEAR), idle), X)
        loaded = stored(saved, path)
        assert set(loaded.meta["qompose"].backends) == {"toy"}
        assert_lower_alike(loaded, saved, (X,))

    def test_one_that_occurs_twice(self, path: Path, offered: Offered) -> None:
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

    def test_a_loaded_model_can_be_saved_again(self, path: Path, offered: Offered) -> None:
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


def test_a_fresh_process(path: Path, tmp_path: Path, offered: Offered) -> None:
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
        [sys.executable, "-c", FRESH + END_AT_ONCE, path, tmp_path / "given"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == qompose.report(saved).to_markdown().strip()


def lowered_mlp(path: Path, **facts: Any) -> GraphModule:
    model: GraphModule = qompose.lower(convert(mlp_program(), toy(LINEAR, VIEW, **facts), X))
    qompose.save(model, path)
    return model


class TestAgain:
    def test_bits_graph_and_report(self, path: Path, offered: Offered) -> None:
        """What is loaded as it was before can be saved again; what is lowered holds no weights for that."""
        saved = lowered_mlp(path)
        first = path.read_bytes()
        before = qompose.load(path, as_converted=True)
        assert discovery._load.cache_info().currsize == 0
        assert_same_model(before, mlp())
        loaded = qompose.load(path)
        assert graph_text(loaded) == graph_text(saved)
        assert torch.equal(loaded(X), saved(X))
        assert qompose.report(loaded) == qompose.report(saved)
        assert qompose.report(loaded).count("int8 kernel") == 3
        with pytest.raises(StageError, match="as_converted=True"):
            qompose.save(loaded, path)
        qompose.save(qompose.lower(before), path)
        assert path.read_bytes() == first

    def test_what_cannot_be_lowered_again_is_named(
        self, path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever goes wrong: a file may have been forged."""
        qompose.save(qompose.lower(mlp()), path)
        monkeypatch.setattr(artifact, "with_kernels", lambda *given: 1 / 0)
        with pytest.raises(ArtefactError, match=path.name):
            qompose.load(path)

    @pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13 copies trees so
    def test_the_caller_need_not_keep_the_converted_model(
        self, path: Path, offered: Offered
    ) -> None:
        converted = mlp()
        lowered = qompose.lower(converted)
        for node in list(converted.graph.nodes):  # nor leave it as it was
            if node.name == "linear_1":
                node.replace_all_uses_with(node.args[0])
        converted.recompile()
        del converted
        qompose.save(copy.deepcopy(lowered), path)
        assert torch.equal(qompose.load(path)(X), lowered(X))

    def test_a_buffer_starts_from_its_exported_state(self, path: Path, offered: Offered) -> None:
        def counts(m: Any, x: Tensor) -> Tensor:
            m.seen.add_(1)
            return layers(m, x) + m.seen

        model = net(counts, seen=nn.Buffer(torch.zeros(())))
        saved = qompose.lower(convert(export(model, X), toy(LINEAR), X))
        first, second = saved(X), saved(X)
        qompose.save(saved, path)
        loaded = qompose.load(path)
        assert torch.equal(loaded(X), first) and torch.equal(loaded(X), second)

    def test_what_fell_back_was_said_when_it_was_lowered(
        self, path: Path, offered: Offered
    ) -> None:
        rule = replace(LINEAR, kernels={})
        offered.rules = (rule, VIEW)
        converted = convert(mlp_program(), toy(rule, VIEW), X)
        with pytest.warns(QomposeWarning, match="no int8 kernel"):
            saved = qompose.lower(converted)
        qompose.save(saved, path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = qompose.load(path)
        assert qompose.report(loaded) == qompose.report(saved)

    def test_other_kernels_are_named(self, path: Path, offered: Offered) -> None:
        saved = lowered_mlp(path)
        offered.rules = tuple(
            replace(r, kernels={}) if r.name == "view" else r for r in ToyBackend().rules
        )
        offered.forget()
        with pytest.warns(QomposeWarning, match=r"view \(toy, rule view\)") as said:
            loaded = qompose.load(path)
        assert [Path(w.filename).name for w in said] == ["test_artefact.py"]
        assert "linear" not in str(said[0].message)
        assert torch.allclose(loaded(X), saved(X), atol=0.1)

    def test_the_report_needs_no_backend(
        self, path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        from qompose.cli.main import main

        saved = lowered_mlp(path)
        monkeypatch.setattr(discovery, "entry_points", lambda group: [])
        assert qompose.report(read(path)) == qompose.report(saved)
        assert main(["report", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["stage"] == "lowered"


class TestBackendsOfLowered:
    def test_a_missing_one(
        self, path: Path, offered: Offered, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lowered_mlp(path)
        monkeypatch.setattr(discovery, "entry_points", lambda group: [])
        with pytest.raises(MissingBackendError, match="as_converted=True") as caught:
            qompose.load(path)
        assert caught.value.name == "toy"
        assert torch.equal(qompose.load(path, as_converted=True)(X), mlp()(X))

    def test_one_without_the_rules(self, path: Path, offered: Offered) -> None:
        lowered_mlp(path)
        offered.rules = tuple(rule for rule in ToyBackend().rules if rule.name != "view")
        offered.forget()
        with pytest.raises(PluginError, match=r'rules view.*"toy-package==1\.2"') as caught:
            qompose.load(path)
        assert caught.value.name == "toy"


def test_another_machine_refuses_or_is_warned_of_once(path: Path, offered: Offered) -> None:
    reasons: list[str] = []
    offered.facts = {
        "requirements": lambda uses: {"bits": "many"},
        "objection": lambda asked: reasons[0] if reasons else None,
    }
    model = lowered_mlp(path, **offered.facts)
    reasons.append("there are few")
    with pytest.raises(RequirementError, match="there are few"):
        qompose.load(path)
    with pytest.warns(RequirementWarning, match="there are few") as said:
        loaded = qompose.load(path, allow_mismatch=True)
    assert len(said) == 1
    assert torch.equal(loaded(X), model(X))


def few_bits() -> GraphModule:
    """The network with integers that a file packs."""
    model = mlp()
    for buffer in model.buffers():
        if buffer.dtype is torch.int8:
            buffer.clamp_(-8, 7)
    return model


class TestPackedUntilLowered:
    """Weights of few bits are unpacked one at a time where a file is lowered as it is loaded."""

    @pytest.fixture(autouse=True)
    def packed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "_WORTH", 1)

    def test_what_is_lowered_is_the_same(self, path: Path, offered: Offered) -> None:
        model = few_bits()
        qompose.save(model, path)
        lowered, loaded = qompose.lower(model), qompose.load(path, target="torch")
        assert torch.equal(loaded(X), lowered(X))
        assert graph_text(loaded) == graph_text(lowered)
        with pytest.raises(StageError):
            qompose.save(loaded, path)

    def test_nothing_packed_leaves(self, path: Path, offered: Offered) -> None:
        """The toy's kernels read integers in the graph, as regions without kernels do."""
        model = few_bits()
        qompose.save(model, path)
        loaded = qompose.load(path, target="torch")
        assert {type(buffer) for buffer in loaded.buffers()} == {Tensor}
        assert torch.equal(loaded(X), qompose.lower(model)(X))

    def test_packed_integers_are_read_and_copied_and_never_written(self) -> None:
        integers = torch.randint(-8, 8, (3, 5), dtype=torch.int8)
        bits, low = 4, -8
        fields = disk.pack_fields(integers, low, bits)
        packed = disk.PackedIntegers(fields, integers.shape, low, bits, torch.int8)
        for other in (packed, copy.deepcopy(packed), copy.copy(packed)):
            assert torch.equal(other + 1, integers + 1)
            assert torch.equal(torch.zeros(3, 5, dtype=torch.int8).copy_(other), integers)
        for write in (
            packed.zero_,
            lambda: packed.add_(1),
            lambda: torch.add(packed, 1, out=packed),
        ):
            with pytest.raises(TypeError):
                write()
        assert torch.equal(packed + 0, integers)

    def test_one_target(self, path: Path, offered: Offered) -> None:
        qompose.save(qompose.lower(mlp()), path)
        assert torch.equal(qompose.load(path, target="torch")(X), qompose.load(path)(X))
        for options in ({"target": "other"}, {"target": "torch", "as_converted": True}):
            with pytest.raises(UserError):
                qompose.load(path, **options)


class TestSeveral:
    """Models by name, of one kind, in one file."""

    def models(self) -> dict[str, GraphModule]:
        model = net()
        programs = {"one": export(model, X), "two": export(model, randn(3, 8))}
        return {
            name: convert(p, toy(LINEAR), p.example_inputs[0][0]) for name, p in programs.items()
        }

    def test_converted_and_lowered(self, path: Path, offered: Offered) -> None:
        converted = self.models()
        for saved in (converted, qompose.lower(converted)):
            qompose.save(saved, path)
            loaded = qompose.load(path)
            assert list(loaded) == ["one", "two"]
            for name, x in (("one", X), ("two", randn(3, 8))):
                assert torch.equal(loaded[name](x), saved[name](x))
                assert qompose.report(loaded[name]) == qompose.report(saved[name])
                assert qompose.report(read(path)[name]) == qompose.report(saved[name])

    def test_what_they_share_is_stored_once(self, path: Path) -> None:
        model = convert(
            export(nn.Linear(512, 512).eval(), randn(2, 512)), toy(LINEAR), randn(2, 512)
        )
        qompose.save(model, path)
        alone = path.stat().st_size
        qompose.save({"a": model, "b": model}, path)
        assert path.stat().st_size < 1.1 * alone
        loaded = qompose.load(path)
        assert loaded["a"].weight_q.data_ptr() == loaded["b"].weight_q.data_ptr()

    def test_what_is_no_set_of_methods(self, path: Path, offered: Offered) -> None:
        converted = self.models()
        with pytest.raises(UserError, match="one target for all methods"):
            qompose.save({"a": converted["one"], "b": qompose.lower(converted["two"])}, path)
        with pytest.raises(UserError, match="'a b'"):
            qompose.save({"a b": converted["one"]}, path)
        with pytest.raises(StageError, match="method 'a': save"):
            qompose.save({"a": X}, path)
        assert not path.exists()

    def test_the_command_reports_each(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from qompose.cli.main import main

        qompose.save(self.models(), path)
        assert main(["report", str(path)]) == 0
        text = capsys.readouterr().out
        assert "method one:" in text and "method two:" in text
        assert main(["report", str(path), "--json"]) == 0
        assert sorted(json.loads(capsys.readouterr().out)) == ["one", "two"]


class TestWhatCannotBeSaved:
    def test_a_pickled_one_has_lost_its_source(self, path: Path, offered: Offered) -> None:
        lowered = qompose.lower(mlp())
        attach(lowered, pickle.loads(pickle.dumps(lowered.meta["qompose"])))
        with pytest.raises(StageError, match="save"):
            qompose.save(lowered, path)

    def test_the_result_of_quantize_has_both(self, path: Path, offered: Offered) -> None:
        result = qompose.quantize(net(), (X,), backends=toy(LINEAR), calibration=[(X,)])
        with pytest.raises(StageError, match=r"\.model.*\.converted"):
            qompose.save(result, path)


def test_the_manifest_tells_with_what_it_was_made(path: Path, offered: Offered) -> None:
    lowered_mlp(path)
    with safe_open(path, framework="pt") as file:
        body = json.loads(file.metadata()["qompose"])["model"]
    manifest = body["manifest"]
    assert manifest["torch"] == torch.__version__
    assert manifest["owners"]["toy"]["distribution"] == "toy-package"
    assert manifest["schemes"] == {"toy": ["static: static"]}
    assert set(manifest["namespaces"]) == {"aten", "quantized_decomposed"}
    assert manifest["machine"]["cpu"] == torch.backends.cpu.get_cpu_capability()
    assert body["target"] == "torch"
    assert body["methods"][""]["lowered"]["kernels"]


def test_a_file_that_says_another_target_than_its_record(path: Path, offered: Offered) -> None:
    from tests.core.storage.test_artefact_files import forge, rewrite

    lowered_mlp(path)
    rewrite(path, lambda body: forge(body, (("target",), "executorch")))
    with pytest.raises(ArtefactError, match="executorch"):
        qompose.load(path)

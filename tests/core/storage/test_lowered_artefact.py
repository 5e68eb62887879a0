# SPDX-License-Identifier: Apache-2.0
"""A lowered model is saved as the converted one and its target, and is lowered again by whoever loads it."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QomposeWarning, UserError
from qompose.backend import Rule, discovery
from qompose.errors import (
    ArtefactError,
    MissingBackendError,
    PluginError,
    RequirementError,
    RequirementWarning,
    StageError,
)
from qompose.plan.plan import attach
from qompose.storage.artifact import read
from safetensors import safe_open
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.core.offering import offered_by_a_package
from tests.core.storage.test_artefact import MLP, X, assert_same_model, mlp, mlp_program
from tests.core.toy import LINEAR, VIEW, ToyBackend, convert, export, graph_text, randn, seeded, toy


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
        class Counts(MLP):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("seen", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
                self.seen.add_(1)
                return super().forward(x) + self.seen

        saved = qompose.lower(convert(export(seeded(Counts()), X), toy(LINEAR), X))
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
        assert [Path(w.filename).name for w in said] == ["test_lowered_artefact.py"]
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


class TestBackends:
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
        with pytest.raises(PluginError, match=r'no rule view.*"toy-package==1\.2"') as caught:
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


class TestSeveral:
    """Models by name, of one kind, in one file."""

    def models(self) -> dict[str, GraphModule]:
        net = seeded(MLP())
        programs = {"one": export(net, X), "two": export(net, randn(3, 8))}
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
        with pytest.raises(UserError, match="one stage and target"):
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
        result = qompose.quantize(seeded(MLP()), (X,), backends=toy(LINEAR), calibration=[(X,)])
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

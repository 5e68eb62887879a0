# SPDX-License-Identifier: Apache-2.0
"""A file that is not sound is refused with what is wrong with it, and runs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose.errors import ArtefactError
from qompose.program.graph import get_attribute
from qompose.storage import artifact, artifact_file
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.core.storage.test_artefact import MLP, ROOT, X, mlp, stored, unquantized
from tests.core.toy import LINEAR, export, prepare, seeded, toy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.qompose"


def rewrite(path: Path, change: Callable[[Any], Any], **facts: Any) -> None:
    """Forge a file: change its description, and make the digest of it right again."""
    with safe_open(path, framework="pt") as file:
        known = json.loads(file.metadata()["qompose"])
    change(known["model"])
    text = json.dumps(known["model"], separators=(",", ":"))
    known |= {"sha256": hashlib.sha256(text.encode()).hexdigest(), **facts}
    save_file(load_file(path), path, {"qompose": json.dumps(known)})


def nodes(body: Any) -> Any:
    return model_in(body)["program"]["graph"]["nodes"]


def model_in(body: Any) -> Any:
    """What is said of the one model."""
    return body["methods"][""]


def set_in(part: Any, key: Any, value: Any) -> None:
    part[key] = value


def plan_in(body: Any) -> Any:
    """The fields of its plan."""
    return model_in(body)["record"]["plan"]


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else []


HINTED = {"hint": 2**40, "range": [0, None], "assumptions": {"integer": True, "positive": True}}
FACTORY = json.dumps(
    {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": []}
)
COMMAND = "__import__('os').system('touch PWNED')"
# fx writes a step of a path that is no identifier as getattr(..., "step").
PATH = 'first.x", None) or getattr(__import__("os"), "system")("touch PWNED") or getattr(self, "y'
FORGERIES = {
    "a function": lambda b: set_in(nodes(b)[-2], "target", "torch.os.system"),
    "a function of a module": lambda b: set_in(nodes(b)[-2], "target", "os.system"),
    "an unknown operator": lambda b: set_in(nodes(b)[-2], "target", "mylib::mine.default"),
    "a method of torch.ops": lambda b: set_in(nodes(b)[-2], "target", "load_library::a.b"),
    "an operator on files": lambda b: set_in(nodes(b)[-2], "target", "aten::from_file.default"),
    "code in a higher-order name": lambda b: set_in(
        nodes(b)[-2], "target", "higher_order::inductor_compiled_code"
    ),
    "code for a name": lambda b: set_in(nodes(b)[0], "name", f"x=({COMMAND})"),
    "code for an argument": lambda b: set_in(nodes(b)[0], "target", f"x=({COMMAND})"),
    "code for a signature": lambda b: set_in(
        model_in(b)["program"]["graph"]["call"], "names", [f"x=({COMMAND})"]
    ),
    "code for a keyword": lambda b: set_in(
        nodes(b)[-2], "kwargs", {"dict": [[f"a=({COMMAND}),b", 1]]}
    ),
    "code for a path": lambda b: (
        [set_in(n, "target", PATH) for n in nodes(b) if n["target"] == "first.bias"]
        + [set_in(b["tensors"], PATH, b["tensors"]["first.bias"])]
    ),
    "code for a size": lambda b: set_in(nodes(b)[0], "example", {"symbolic": ["int", COMMAND]}),
    "code for a symbol": lambda b: set_in(
        model_in(b)["program"],
        "symbols",
        {COMMAND: {"hint": 1, "range": [0, 1], "assumptions": {}}},
    ),
    "a factory": lambda b: set_in(
        model_in(b)["program"]["graph"]["call"],
        "outputs",
        json.dumps(
            [1, {"type": "collections.defaultdict", "context": FACTORY, "children_spec": []}]
        ),
    ),
    "a class": lambda b: set_in(model_in(b)["record"], "plan", {"Popen": {}}),
    "no plan": lambda b: model_in(b)["record"].pop("plan"),
    "an attribute of torch": lambda b: set_in(nodes(b)[-2], "args", [{"dtype": "load"}]),
    "no program": lambda b: model_in(b).pop("program"),
    "no manifest": lambda b: b.pop("manifest"),
    "a missing node": lambda b: nodes(b).pop(2),
    "a view beyond its block": lambda b: set_in(b["tensors"]["first.bias"], "shape", [10**9]),
    "a view before its block": lambda b: set_in(b["tensors"]["first.bias"], "offset", -1),
    "a view of nothing": lambda b: b["tensors"]["first.bias"].pop("block"),
    "a view of huge strides": lambda b: set_in(b["tensors"]["first.bias"], "stride", [2**62]),
    "a view of a huge shape": lambda b: b["tensors"]["first.bias"].update(
        shape=[2**40], stride=[2**40]
    ),
    "a negative size": lambda b: set_in(b["tensors"]["first.bias"], "shape", [-1]),
    "a negative stride": lambda b: set_in(b["tensors"]["first.bias"], "stride", [-1]),
    "a size that is no number": lambda b: set_in(b["tensors"]["first.bias"], "shape", ["16"]),
    "a size too many": lambda b: set_in(b["tensors"]["first.bias"], "shape", [4, 4]),
    "memory that is not there": lambda b: (
        b["tensors"]["first.bias"].update(shape=[2**40]),
        b["tensors"]["first.bias"].pop("block"),
    ),
    "a tensor without memory": lambda b: set_in(b["tensors"]["first.bias"], "device", "meta"),
    "itself": lambda b: set_in(b["tensors"], "first.bias", "first.bias"),
    "a power of numbers": lambda b: set_in(
        nodes(b)[0], "example", {"symbolic": ["int", "Pow(10, 10000000000)"]}
    ),
    "a tower of powers": lambda b: set_in(
        nodes(b)[0],
        "example",
        {"symbolic": ["int", "Pow(Pow(Pow(9, 99), 99), 99)"]},
    ),
    "a tower of a hint": lambda b: (
        set_in(model_in(b)["program"], "symbols", {"s0": HINTED}),
        set_in(nodes(b)[0], "example", {"symbolic": ["int", "PowByNatural(2, s0)"]}),
    ),
    "an operator that writes a file": lambda b: set_in(
        nodes(b)[-2], "target", "qompose_test::dump.default"
    ),
    "depth": lambda b: set_in(nodes(b)[-2], "args", _nested(600)),
    "modules in modules": lambda b: set_in(
        next(n for n in nodes(b) if n["target"] == "first.bias"), "target", "a." * 5000 + "b"
    ),
    "an argument too few": lambda b: set_in(
        model_in(b)["program"]["graph"]["call"],
        "inputs",
        pytree.treespec_dumps(pytree.tree_structure(((), {}))),
    ),
    "facts of no name": lambda b: set_in(nodes(b)[-2], "facts", ["claim", 1]),
    "a claim of another type": lambda b: set_in(plan_in(b)["claims"][0], "rule", 3),
    "a claim that is not there": lambda b: set_in(plan_in(b)["operators"][0], "claim", 99),
    "no groups": lambda b: set_in(plan_in(b), "groups", []),
    "a package of another name": lambda b: set_in(
        b["manifest"]["owners"],
        "toy",
        {"backend": "a", "distribution": 'x"; rm -rf', "version": "1"},
    ),
    "a method of no name": lambda b: set_in(b["methods"], "a b", b["methods"].pop("")),
    "no methods": lambda b: b["methods"].clear(),
    "other blocks": lambda b: b["blocks"].pop("first.bias"),
}


HALFWAY = """
import os, resource, signal, sys
import qompose
from qompose.storage import artifact_file
from tests.core.storage.test_artefact import mlp
model = mlp()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
try:
    qompose.save(model, sys.argv[1])
except OSError as error:
    os.write(1, str(error).encode())
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
def killed(blocks, draft, metadata):
    draft.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
artifact_file.save_file = killed
qompose.save(model, sys.argv[1])
"""


class TestFiles:
    """A file that is not sound is refused with what is wrong, and runs nothing."""

    @pytest.mark.parametrize("forgery", FORGERIES)
    def test_forged(self, forgery: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        qompose.save(mlp(), path)
        rewrite(path, FORGERIES[forgery])
        monkeypatch.chdir(path.parent)
        with torch.library._scoped_library("qompose_test", "FRAGMENT") as library:
            library.define("dump(Tensor x, str path) -> Tensor")
            with pytest.raises(ArtefactError, match=r"model\.qompose"):
                qompose.load(path)
        assert not (path.parent / "PWNED").exists()

    def test_every_flipped_byte_is_noticed(self, path: Path) -> None:
        saved = mlp()
        qompose.save(saved, path)
        sound = path.read_bytes()
        unnoticed = 0
        for place in range(0, len(sound), 197):
            damaged = bytearray(sound)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            try:
                loaded = qompose.load(path)
            except ArtefactError:
                continue
            # The writer's name, or a type in the header that the description tells too.
            assert torch.equal(loaded(X), saved(X))
            unnoticed += 1
        assert unnoticed < 3

    @pytest.mark.parametrize("kind", ["torch.save", "text", "safetensors"])
    def test_foreign(self, kind: str, path: Path) -> None:
        if kind == "torch.save":
            torch.save({"x": X}, path)
        elif kind == "text":
            path.write_text("hello " * 100)
        else:
            save_file({"x": X}, path)
        reason = {
            "torch.save": "zip archive",
            "text": "not written by",
            "safetensors": "did not write",
        }
        with pytest.raises(ArtefactError, match=reason[kind]):
            qompose.load(path)

    @pytest.mark.parametrize(
        "change",
        [
            lambda text: text.replace('"format_version":4', '"format_version":1e999'),
            lambda text: text.replace('"format_version":4', '"format_version":true'),
            lambda text: text.replace('"format_version":4', '"format_version":"2"'),
            lambda text: text.replace('"format_version":4', '"format_version":0'),
            lambda text: text.replace('"training":true', '"training":NaN', 1),
            lambda text: text.replace('"training":true', '"training":1e999', 1),
            lambda text: text[:-1] + ',"more":' + "[" * 200_000 + "]" * 200_000 + "}",
            lambda text: text[:-1] + ',"more":' + "9" * 5000 + "}",
            lambda text: "3",
        ],
    )
    def test_descriptions_that_are_none(self, change: Callable[[str], str], path: Path) -> None:
        """However the digest stands to them."""
        qompose.save(mlp(), path)
        with safe_open(path, framework="pt") as file:
            text = file.metadata()["qompose"]
        assert change(text) != text
        save_file(load_file(path), path, {"qompose": change(text)})
        with pytest.raises(ArtefactError, match="is damaged"):
            qompose.load(path)

    def test_older(self, path: Path) -> None:
        qompose.save(mlp(), path)
        rewrite(path, lambda body: None, format_version=3)
        with pytest.raises(ArtefactError, match=r"version 3 .*Save the model again"):
            qompose.load(path)

    def test_a_device_that_is_not_here(self, path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("it is here")
        qompose.save(mlp(), path)
        rewrite(
            path,
            lambda b: [
                set_in(v, "device", "cuda:0") for v in b["tensors"].values() if "device" in v
            ],
        )
        with pytest.raises(
            ArtefactError, match=r"on the device 'cuda:0', which this process cannot use"
        ):
            qompose.load(path)

    def test_newer(self, path: Path) -> None:
        qompose.save(mlp(), path)
        rewrite(path, lambda body: body.clear(), format_version=99, written_by="qompose 7.0")
        with pytest.raises(ArtefactError, match=r"version 99 .*qompose 7\.0.*Upgrade"):
            qompose.load(path)

    def test_absent(self, path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            qompose.load(path)

    def test_an_operator_that_nobody_registered(self, path: Path) -> None:
        with torch.library._scoped_library("qompose_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

            class Custom(nn.Module):
                def forward(self, x: Tensor) -> Tensor:
                    return torch.ops.qompose_test.twice(x)

            loaded = stored(unquantized(Custom(), X), path)
            assert torch.equal(loaded(X), X * 2)
        rewrite(path, lambda b: set_in(nodes(b)[1], "target", "qompose_test::thrice.default"))
        reason = r"qompose_test::thrice\.default is not registered.*Import the package"
        with pytest.raises(ArtefactError, match=reason):
            qompose.load(path)

    def test_a_failed_save_leaves_the_old_file(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        qompose.save(mlp(), path)
        before = path.read_bytes()

        def fail(blocks: Any, draft: Path, metadata: Any) -> None:
            draft.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(artifact_file, "save_file", fail)
        with pytest.raises(OSError, match="no space left"):
            qompose.save(mlp(LINEAR), path)
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    def test_a_name_as_long_as_names_can_be(self, tmp_path: Path) -> None:
        path = tmp_path / ("a" * 120 + "." + "b" * 134)
        qompose.save(mlp(), path)
        assert qompose.load(path).graph

    def test_an_operator_on_files_is_not_saved(self, path: Path) -> None:
        with torch.library._scoped_library("qompose_test", "FRAGMENT") as library:
            library.define("dump(Tensor x, str path) -> Tensor")
            library.impl("dump", lambda x, path: x.clone(), "CompositeExplicitAutograd")

            class Dump(nn.Module):
                def forward(self, x: Tensor) -> Tensor:
                    return torch.ops.qompose_test.dump(x, "somewhere")

            with pytest.raises(
                ArtefactError, match=r"dump\.default, which takes the name of a file"
            ):
                qompose.save(unquantized(Dump(), X), path)
        assert not path.exists()

    def test_a_process_that_ends_halfway_leaves_the_old_file(self, path: Path) -> None:
        """Where there is no room, and where it is killed."""
        qompose.save(mlp(), path)
        before = path.read_bytes()
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        done = subprocess.run(
            [sys.executable, "-c", HALFWAY, path], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        assert f"{path.name} cannot be written" in done.stdout, done.stderr
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert path.read_bytes() == before
        (draft,) = {*path.parent.iterdir()} - {path}
        assert draft.read_bytes() == b"half", "what the full disk left is gone"

    def test_savers_at_once_leave_one_whole_file(self, path: Path) -> None:
        models = [mlp(), mlp(LINEAR)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: qompose.save(models[n % 2], path), range(12)))
        assert list(path.parent.iterdir()) == [path]
        assert torch.equal(qompose.load(path)(X), models[0](X)) or torch.equal(
            qompose.load(path)(X), models[1](X)
        )

    def test_a_pipe_is_refused_before_any_work(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.mkfifo(path)
        monkeypatch.setattr(artifact, "ProgramWriter", None)
        with pytest.raises(qompose.UserError, match="it is a pipe, and a file would replace it"):
            qompose.save(mlp(), path)
        assert path.is_fifo()
        assert list(path.parent.iterdir()) == [path]

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(IsADirectoryError, match="directory"):
            qompose.load(tmp_path)

    def test_files_have_the_permissions_of_the_process(self, path: Path) -> None:
        qompose.save(mlp(), path)
        (path.parent / "other").touch()
        assert path.stat().st_mode == (path.parent / "other").stat().st_mode

    def test_other_tools_can_list_the_tensors(self, path: Path) -> None:
        saved = mlp()
        qompose.save(saved, path)
        tensors = load_file(path)
        assert torch.equal(tensors["first.weight_q"], get_attribute(saved, "first.weight_q"))
        assert "first.weight" not in tensors

    @pytest.mark.parametrize("stage", ["prepared", "exported"])
    def test_other_stages(self, stage: str, path: Path) -> None:
        program = export(seeded(MLP()), X)
        model: Any = {
            "prepared": lambda: prepare(program, toy(LINEAR)),
            "exported": lambda: program,
        }[stage]()
        with pytest.raises(
            qompose.errors.StageError, match="save takes a converted or reference or lowered model"
        ):
            qompose.save(model, path)

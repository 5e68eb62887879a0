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
from qompose.program import disk
from qompose.program.graph import get_attribute
from qompose.storage import artifact
from qompose.storage.json_values import expression
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from tests.core.storage.test_artefact import X, mlp, mlp_file, mlp_program, stored, unquantized
from tests.core.toy import LINEAR, Call, NullQuantizer, prepare, toy


def rewrite(path: Path, change: Callable[[Any], Any], **facts: Any) -> None:
    """Forge a file: change its description, and make the digest of it right again."""
    with safe_open(path, framework="pt") as file:
        known = json.loads(file.metadata()["qompose"])
    change(known["model"])
    text = json.dumps(known["model"], separators=(",", ":"))
    known |= {"sha256": hashlib.sha256(text.encode()).hexdigest(), **facts}
    save_file(load_file(path), path, {"qompose": json.dumps(known)})


METHOD = ("methods", "")
GRAPH = (*METHOD, "program", "graph")
NODES, CALL = (*GRAPH, "nodes"), (*GRAPH, "call")
SYMBOLS = (*METHOD, "program", "symbols")
BIAS, INPUT, LAST = (*NODES, 3), (*NODES, 8), (*NODES, -2)
"""The node that reads `first.bias`, the placeholder, and the last call."""
PLAN = (*METHOD, "record", "plan")
VIEW = ("tensors", "first.bias")
GONE = object()


def forge(body: Any, *edits: tuple[tuple[Any, ...], Any]) -> None:
    """Put values in the places that keys lead to, or take away what is there."""
    for (*where, last), value in edits:
        part = body
        for key in where:
            part = part[key]
        if value is GONE:
            del part[last]
        else:
            part[last] = value


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else []


def _size(text: str) -> Any:
    return {"symbolic": ["int", text]}


HINTED = {"hint": 2**40, "range": [0, None], "assumptions": {"integer": True, "positive": True}}
FACTORY = json.dumps(
    {"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": []}
)
TREE = {"type": "collections.defaultdict", "context": FACTORY, "children_spec": []}
NO_ARGUMENTS = pytree.treespec_dumps(pytree.tree_structure(((), {})))
COMMAND = "__import__('os').system('touch PWNED')"
# fx writes a step of a path that is no identifier as getattr(..., "step").
PATH = 'first.x", None) or getattr(__import__("os"), "system")("touch PWNED") or getattr(self, "y'
PACKAGE = {"backend": "a", "distribution": 'x"; rm -rf', "version": "1"}
FORGERIES: dict[str, list[tuple[tuple[Any, ...], Any]]] = {
    "a function": [((*LAST, "target"), "torch.os.system")],
    "a function of a module": [((*LAST, "target"), "os.system")],
    "an unknown operator": [((*LAST, "target"), "mylib::mine.default")],
    "a method of torch.ops": [((*LAST, "target"), "load_library::a.b")],
    "an operator on files": [((*LAST, "target"), "aten::from_file.default")],
    "an operator that writes a file": [((*LAST, "target"), "qompose_test::dump.default")],
    "code in a higher-order name": [((*LAST, "target"), "higher_order::inductor_compiled_code")],
    "a method": [((*LAST, "op"), "call_method"), ((*LAST, "target"), "detach")],
    "code for a name": [((*INPUT, "name"), f"x=({COMMAND})")],
    "code for an argument": [((*INPUT, "target"), f"x=({COMMAND})")],
    "code for a signature": [((*CALL, "names"), [f"x=({COMMAND})"])],
    "code for a keyword": [((*LAST, "kwargs"), {"dict": [[f"a=({COMMAND}),b", 1]]})],
    "code for a path": [((*BIAS, "target"), PATH), (("tensors", PATH), "first.bias")],
    "code for a size": [((*INPUT, "example"), _size(COMMAND))],
    "code for a symbol": [(SYMBOLS, {COMMAND: {"hint": 1, "range": [0, 1], "assumptions": {}}})],
    "a factory": [((*CALL, "outputs"), json.dumps([1, TREE]))],
    "a class": [(PLAN, {"Popen": {}})],
    "an attribute of torch": [((*LAST, "args"), [{"dtype": "load"}])],
    "no plan": [(PLAN, GONE)],
    "no program": [((*METHOD, "program"), GONE)],
    "no manifest": [(("manifest",), GONE)],
    "a missing node": [((*NODES, 2), GONE)],
    "a view beyond its block": [((*VIEW, "shape"), [10**9])],
    "a view before its block": [((*VIEW, "offset"), -1)],
    "a view of nothing": [((*VIEW, "block"), GONE)],
    "a view of huge strides": [((*VIEW, "stride"), [2**62])],
    "a view of a huge shape": [((*VIEW, "shape"), [2**40]), ((*VIEW, "stride"), [2**40])],
    "a negative size": [((*VIEW, "shape"), [-1])],
    "a negative stride": [((*VIEW, "stride"), [-1])],
    "a size that is no number": [((*VIEW, "shape"), ["16"])],
    "a size too many": [((*VIEW, "shape"), [4, 4])],
    "memory that is not there": [((*VIEW, "shape"), [2**40]), ((*VIEW, "block"), GONE)],
    "a tensor without memory": [((*VIEW, "device"), "meta")],
    "itself": [(VIEW, "first.bias")],
    "a power of numbers": [((*INPUT, "example"), _size("Pow(10, 10000000000)"))],
    "a tower of powers": [((*INPUT, "example"), _size("Pow(Pow(Pow(9, 99), 99), 99)"))],
    "a tower of a hint": [
        (SYMBOLS, {"s0": HINTED}), ((*INPUT, "example"), _size("PowByNatural(2, s0)")),
    ],
    "depth": [((*LAST, "args"), _nested(600))],
    "modules in modules": [((*BIAS, "target"), "a." * 5000 + "b")],
    "an argument too few": [((*CALL, "inputs"), NO_ARGUMENTS)],
    "facts of no name": [((*LAST, "facts"), {"dict": [[1, "claim"]]})],
    "a record of another stage": [((*METHOD, "record", "stage"), "prepared")],
    "a power of a power": [
        (SYMBOLS, {"s0": {**HINTED, "hint": 1}}),
        ((*INPUT, "example"), _size("Pow(Pow(s0, 99), 99)")),
    ],
    "a claim of another type": [((*PLAN, "claims", 0, "rule"), 3)],
    "a claim that is not there": [((*PLAN, "operators", 0, "claim"), 99)],
    "a group that is not there": [((*PLAN, "groups", 0, "depends_on"), [99])],
    "a point in no group": [((*PLAN, "claims", 0, "specs", 2, "point", "source"), "nothing")],
    "a package of another name": [(("manifest", "owners", "toy"), PACKAGE)],
    "a method of no name": [(("methods", "a b"), {}), (METHOD, GONE)],
    "no methods": [(("methods",), {})],
    "no version of torch": [(("manifest", "torch"), 2)],
    "no version of qompose": [(("manifest", "qompose"), 1)],
    "other blocks": [(("blocks", "first.bias"), GONE)],
}  # fmt: skip
HALFWAY = """
import os, resource, signal, sys
import qompose
from qompose.storage import artifact_file
model = qompose.load(sys.argv[1])
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
        path.write_bytes(mlp_file())
        rewrite(path, lambda body: forge(body, *FORGERIES[forgery]))
        monkeypatch.chdir(path.parent)
        with torch.library._scoped_library("qompose_test", "FRAGMENT") as library:
            library.define("dump(Tensor x, str path) -> Tensor")
            with pytest.raises(ArtefactError, match=r"model\.qompose"):
                qompose.load(path)
        assert not (path.parent / "PWNED").exists()

    def test_every_flipped_byte_is_noticed(self, path: Path) -> None:
        saved, sound = mlp(), mlp_file()
        unnoticed = 0
        for place in range(0, len(sound), 397):
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
        with pytest.raises(ArtefactError, match=path.name):
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
        path.write_bytes(mlp_file())
        with safe_open(path, framework="pt") as file:
            text = file.metadata()["qompose"]
        assert change(text) != text
        save_file(load_file(path), path, {"qompose": change(text)})
        with pytest.raises(ArtefactError, match=path.name):
            qompose.load(path)

    @pytest.mark.parametrize("version", [1, 3, 99], ids=["first", "older", "newer"])
    def test_other_versions_of_the_format(self, version: int, path: Path) -> None:
        path.write_bytes(mlp_file())
        rewrite(path, lambda body: body.clear(), format_version=version, written_by="qompose 7.0")
        with pytest.raises(ArtefactError, match=f"version {version}, .*qompose"):
            qompose.load(path)

    def test_a_device_that_is_not_here(self, path: Path) -> None:
        if torch.cuda.is_available():
            pytest.skip("it is here")
        path.write_bytes(mlp_file())
        rewrite(path, lambda body: forge(body, ((*VIEW, "device"), "cuda:0")))
        with pytest.raises(ArtefactError, match="cuda:0"):
            qompose.load(path)

    def test_an_operator_that_nobody_registered(self, path: Path) -> None:
        with torch.library._scoped_library("qompose_test", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
            loaded = stored(unquantized(Call(torch.ops.qompose_test.twice), X), path)
            assert torch.equal(loaded(X), X * 2)
        thrice = ((*NODES, 1, "target"), "qompose_test::thrice.default")
        rewrite(path, lambda body: forge(body, thrice))
        with pytest.raises(ArtefactError, match=r"qompose_test::thrice\.default"):
            qompose.load(path)

    def test_a_name_as_long_as_names_can_be(self, tmp_path: Path) -> None:
        path = tmp_path / ("a" * 120 + "." + "b" * 134)
        qompose.save(mlp(), path)
        assert qompose.load(path).graph

    @pytest.mark.parametrize("computed", [lambda n: n * 2**130, lambda n: n**50, lambda n: n >> 70])
    def test_a_size_of_more_bits_than_sizes_have_is_not_saved(
        self, computed: Callable[[Any], Any], path: Path
    ) -> None:
        """Of a shift that leaves nothing, torch makes a division by infinity."""
        huge = Call(lambda x: x * torch.sym_float(computed(x.shape[0])))
        shapes = (({0: torch.export.Dim("batch", min=2, max=9)},),)
        program = torch.export.export(huge, (X,), dynamic_shapes=shapes)
        with pytest.raises(ArtefactError, match="the size"):
            qompose.save(qompose.convert_pt2e(prepare(program, NullQuantizer())), path)
        assert not path.exists()
        largest = str(2**128 - 1)
        assert [expression(text, {}, {}) for text in (largest, "Pow(1, 128)")] == [2**128 - 1, 1]

    def test_powers_of_a_number_from_data(self, path: Path) -> None:
        """What it is in an example nobody knows."""
        below, above = (
            unquantized(Call(lambda x, n=n: x * torch.sym_float(x.argmax().item() ** n)), X)
            for n in (128, 129)
        )
        one = X - X
        one[0, 1] = 1
        assert torch.equal(stored(below, path)(one), one)
        with pytest.raises(ArtefactError, match="128"):
            qompose.save(above, path)

    def test_an_operator_on_files_is_not_saved(self, path: Path) -> None:
        with torch.library._scoped_library("qompose_test", "FRAGMENT") as library:
            library.define("dump(Tensor x, str path) -> Tensor")
            library.impl("dump", lambda x, path: x.clone(), "CompositeExplicitAutograd")
            dump = Call(lambda x: torch.ops.qompose_test.dump(x, "somewhere"))
            with pytest.raises(ArtefactError, match=r"dump\.default"):
                qompose.save(unquantized(dump, X), path)
        assert not path.exists()

    def test_a_process_that_ends_halfway_leaves_the_old_file(self, path: Path) -> None:
        """Where there is no room, and where it is killed."""
        qompose.save(unquantized(torch.nn.Linear(8, 8), X), path)
        before = path.read_bytes()
        command = [sys.executable, "-c", HALFWAY, path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"{path.name} cannot be written" in done.stdout, done.stderr
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert path.read_bytes() == before
        (folder,) = {*path.parent.iterdir()} - {path}
        (draft,) = folder.iterdir()
        assert draft.read_bytes() == b"half", "what the full disk left is gone"

    def test_savers_at_once_leave_one_whole_file(self, path: Path) -> None:
        models = [mlp(), mlp(LINEAR)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: qompose.save(models[n % 2], path), range(12)))
        assert list(path.parent.iterdir()) == [path]
        loaded = qompose.load(path)(X)
        assert any(torch.equal(loaded, model(X)) for model in models)

    def test_a_pipe_is_refused_before_any_work(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.mkfifo(path)
        monkeypatch.setattr(artifact, "ProgramWriter", None)
        with pytest.raises(qompose.UserError, match="pipe"):
            qompose.save(mlp(), path)
        assert path.is_fifo()
        assert list(path.parent.iterdir()) == [path]

    def test_other_tools_can_read_the_file_and_list_the_tensors(self, path: Path) -> None:
        saved = mlp()
        with pytest.raises(FileNotFoundError):
            qompose.load(path)
        qompose.save(saved, path)
        (path.parent / "other").touch()
        assert path.stat().st_mode == (path.parent / "other").stat().st_mode
        tensors = load_file(path)
        assert torch.equal(tensors["first.weight_q"], get_attribute(saved, "first.weight_q"))
        assert "first.weight" not in tensors

    @pytest.mark.parametrize("stage", ["prepared", "exported"])
    def test_other_stages(self, stage: str, path: Path) -> None:
        program = mlp_program()
        model: Any = prepare(program, toy(LINEAR)) if stage == "prepared" else program
        with pytest.raises(qompose.errors.StageError, match="save"):
            qompose.save(model, path)


@pytest.mark.parametrize("count", [17, 18, 2**20 + 18])
@pytest.mark.parametrize("bits", disk.BITS)
def test_fields_follow_one_another_without_gaps(bits: int, count: int) -> None:
    low, generator = -3, torch.Generator().manual_seed(bits)
    x = torch.randint(low, low + 2**bits, (count,), generator=generator).to(torch.int8)
    packed = disk.pack_fields(x, low, bits)
    places = (x.long() - low)[:, None] >> torch.arange(bits) & 1
    expected = torch.nn.functional.pad(places.flatten(), (0, -places.numel() % 8)).view(-1, 8)
    assert torch.equal(packed.long(), (expected << torch.arange(8)).sum(1))
    assert torch.equal(disk.unpack_fields(packed, count, low, bits, torch.int8), x)

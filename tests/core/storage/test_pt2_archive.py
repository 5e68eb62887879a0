# SPDX-License-Identifier: Apache-2.0
"""An archive of torch.export that could run code is refused, and torch alone opens what we write."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose import QuantizationConfig, QuantizationSpec, UserError
from qompose.errors import ArtefactError, StageError
from qompose.observers import PerBlockMinMaxObserver
from qompose.storage import pt2_archive
from qompose.storage.pt2_archive import load_program
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.toy import LINEAR, Model, convert, export, prepare, randn, seeded, toy
from tests.processes import python
from tests.sampling import one_of
from tests.zoo import ZOO, ZooModel

WEIGHTS, MODEL = "data/weights/model_weights_config.json", "models/model.json"
EXAMPLES = "data/sample_inputs/model.pt"
COMMAND = "__import__('os').system('touch PWNED')"


@dataclass
class Unnamed:
    """torch exports what returns it, and has no name for it in files."""

    y: Tensor


torch.export.register_dataclass(Unnamed)


def twice(m: Any, x: Tensor, pair: dict[str, Tensor]) -> Tensor:
    return torch.cat([m.linear(x)] * 2) + pair["y"][: 2 * x.shape[0]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The entries of an archive of a program with a dynamic size."""
    batch = Dim("batch", min=2, max=9)
    shapes = {"x": {0: batch}, "pair": {"y": {0: 2 * batch}}}
    inputs = (randn(3, 4), {"y": randn(6, 4)})
    path = tmp_path_factory.mktemp("sound") / "a.pt2"
    net = seeded(Model(twice, linear=nn.Linear(4, 4)))
    torch.export.save(torch.export.export(net, inputs, dynamic_shapes=shapes), path)
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write(entries: dict[str, bytes], path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(f"a/{name}", content)


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch PWNED",)


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, bytes]], None]:
    """Return what changes the JSON of an entry."""

    def edit(entries: dict[str, bytes]) -> None:
        data = json.loads(entries[name])
        change(data)
        entries[name] = json.dumps(data).encode()

    return edit


def graph(data: Any) -> Any:
    return data["graph_module"]["graph"]


def calling(target: str) -> Callable[[dict[str, bytes]], None]:
    return edited(MODEL, lambda data: graph(data)["nodes"][-1].update(target=target))


def as_size(text: str) -> Callable[[dict[str, bytes]], None]:
    size = {"as_expr": {"expr_str": text, "hint": {"as_int": 3}}}

    def change(data: Any) -> None:
        graph(data)["tensor_values"]["x"]["sizes"][0] = size

    return edited(MODEL, change)


def as_weight(**facts: Any) -> Callable[[dict[str, bytes]], None]:
    return edited(WEIGHTS, lambda d: d["config"]["linear.weight"].update(facts))


def as_tree(context: Any) -> Callable[[dict[str, bytes]], None]:
    """Change the context of the argument that is a dict; its text is escaped, and means the same."""
    text = json.dumps(context).replace("__enum__", "\\u005f_enum__")

    def change(data: Any) -> None:
        signature = data["graph_module"]["module_call_graph"][0]["signature"]
        version, tree = json.loads(signature["in_spec"])
        tree["children_spec"][0]["children_spec"][1]["context"] = text
        signature["in_spec"] = json.dumps([version, tree])

    return edited(MODEL, change)


def add(name: str, content: bytes = b"") -> Callable[[dict[str, bytes]], None]:
    return lambda entries: entries.update({name: content})


FORGERIES: dict[str, Callable[[dict[str, bytes]], None]] = {
    "pickled weight": as_weight(use_pickle=True),
    "weight elsewhere": as_weight(path_name="../../etc/passwd"),
    "weight of no memory": lambda e: (
        as_weight(path_name="weight_7")(e), add("data/weights/weight_7")(e))[0],
    "weights as text": edited(WEIGHTS, lambda d: d.update(config=3)),
    "custom object": add("data/constants/custom_obj_0", pickled(Evil())),
    "opaque object": add("data/constants/opaque_obj_0", pickled(Evil())),
    "legacy weights": add("data/weights/model.pt", pickled(Evil())),
    "legacy archive": add("serialized_state_dict.pt", pickled(Evil())),
    "compiled code": add("data/aotinductor/model/model.so", b"ELF"),
    "second program": add("models/other.json", b"{}"),
    "something": add("data/xl_weights/a"),
    "examples": add(EXAMPLES, pickled(((Evil(),), {}))),
    "damaged examples": add(EXAMPLES, b"hello"),
    "attribute of torch": calling("torch.hub.load"),
    "module of torch": calling("torch.os.system"),
    "function": calling("_operator.methodcaller"),
    "extension": calling("#a.b"),
    "method of torch.ops": calling("torch.ops.load_library"),
    "operator on files": calling("torch.ops.aten.from_file.default"),
    "unknown operator": calling("torch.ops.mylib.mine.default"),
    "operator as argument": edited(MODEL, lambda d: graph(d)["nodes"][-1]["inputs"].append(
        {"name": "f", "arg": {"as_operator": "torch.hub.load"}, "kind": 1})),
    "code for a size": as_size(COMMAND),
    "attribute in a size": as_size("(1).__class__"),
    "code in a text": as_size(f'Max("{COMMAND}", 1)'),
    "code for a symbol": as_size(f'Symbol("{COMMAND}")'),
    "other function": as_size("lambdify(x, y)"),
    "lambda": as_size("(lambda: 3)()"),
    "no expression": as_size("import os"),
    "large power": as_size("Pow(10, 10000000000)"),
    "tower": as_size("Pow(Pow(Pow(2, 60), 60), 60)"),
    "large number": as_size("1" * 200),
    "symbol": edited(MODEL, lambda d: d["range_constraints"].update(u10000000000={})),
    "enumeration": as_tree([{"__enum__": True, "fqn": "os.system", "name": "x"}]),
    "factory": as_tree(
        {"default_factory_module": "os", "default_factory_name": "abort", "dict_context": ["y"]}),
    "no tree": edited(
        MODEL, lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(in_spec="[1")),
    "no program": lambda entries: entries.pop(MODEL) and None,
    "no JSON": add(MODEL, b"["),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_refused(
    forgery: str, sound: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = dict(sound)
    FORGERIES[forgery](entries)
    assert entries != sound
    write(entries, tmp_path / "b.pt2")
    monkeypatch.chdir(tmp_path)

    seen: list[Any] = []  # by torch, which evaluates what it reads
    monkeypatch.setattr(pt2_archive, "load_pt2", seen.append)
    with pytest.raises(UserError, match=r"b\.pt2"):
        load_program(tmp_path / "b.pt2")
    assert not seen and not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "kind", ["twice", "compressed", "two folders", "flipped", "cut", MODEL, "archive_format"]
)
def test_archives_that_torch_does_not_write(
    kind: str, sound: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "b.pt2"
    write(sound | ({kind: b"{}"} if kind in sound else {}), path)
    if kind == "flipped":
        content = path.read_bytes()
        place = content.index(sound["data/weights/weight_0"])
        path.write_bytes(content[:place] + b"~" + content[place + 1 :])
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif kind not in sound:
        method = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "a", method) as archive, pytest.MonkeyPatch.context() as patch:
            patch.setattr(zipfile.ZipFile, "_writecheck", lambda *_: None)
            root = "b" if kind == "two folders" else "a"
            name = MODEL if kind == "twice" else "extra/more"
            archive.writestr(f"{root}/{name}", b"{}")
    with pytest.raises(UserError, match=r"b\.pt2") as error:
        load_program(path)
    if kind == "flipped":
        assert isinstance(error.value.__cause__, pt2_archive.RefusedArchive)


def test_nothing_but_what_was_checked_is_there(sound: dict[str, bytes], tmp_path: Path) -> None:
    """What stands in a file before, between and behind its entries is not passed on."""
    write(sound, tmp_path / "b.pt2")
    hidden = b"hidden" * 100
    (tmp_path / "c.pt2").write_bytes(hidden + (tmp_path / "b.pt2").read_bytes())
    x, y = randn(4, 4), randn(8, 4)
    one, other = (
        load_program(tmp_path / name).module()(x, {"y": y}) for name in ("b.pt2", "c.pt2")
    )
    assert torch.equal(one, other)


def test_guards_are_source_and_are_not_kept(
    sound: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = dict(sound)
    edited(MODEL, lambda d: d.update(guards_code=[COMMAND]))(entries)
    write(entries, tmp_path / "b.pt2")
    monkeypatch.chdir(tmp_path)
    load_program(tmp_path / "b.pt2").module()(randn(2, 4), {"y": randn(4, 4)})
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "model", one_of(40, [m for m in ZOO if "transformers" not in m.tags]), ids=str
)
def test_programs_are_read_as_they_were(model: ZooModel, tmp_path: Path) -> None:
    program = model.export(dynamic=model.dynamic_shapes is not None)
    torch.export.save(program, tmp_path / "a.pt2")
    inputs = model.inputs()
    with torch.no_grad():
        loaded = load_program(tmp_path / "a.pt2").module()
        assert_same_outputs(program.module()(*inputs), loaded(*inputs))


def linear() -> ExportedProgram:
    return export(seeded(nn.Linear(3, 4)), randn(2, 3))


class TestLoad:
    """What torch.export.save wrote, and nothing else."""

    def test_the_name_of_the_file_says_nothing(self, tmp_path: Path) -> None:
        torch.export.save(linear(), tmp_path / "a.pt2")
        (tmp_path / "a.pt2").rename(tmp_path / "a.export")
        assert load_program(tmp_path / "a.export").graph

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("artefact", "qompose report"), ("safetensors", "safetensors"), ("pickle", r"by torch\.save"),
            ("zip", "zip"), ("text", "zip"), ("empty", "zip"),
        ],
    )  # fmt: skip
    def test_other_files_are_named(self, tmp_path: Path, kind: str, said: str) -> None:
        path = tmp_path / "file.pt2"
        if kind == "artefact":
            qompose.save(convert(linear(), toy(LINEAR), randn(2, 3)), path)
        elif kind == "safetensors":
            save_file({"a": randn(2)}, path)
        elif kind == "pickle":
            torch.save({"a": 1}, path)
        elif kind == "zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("a.txt", "a")
        else:
            path.write_text("some words" * (kind == "text"))
        with pytest.raises(UserError, match=rf"file\.pt2 .*: .*{said}"):
            load_program(path)

    def test_a_missing_file_is_an_os_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            load_program(tmp_path / "a.pt2")


READER = """
import sys
sys.modules["qompose"] = None  # as if it was not installed
import torch
import torch.ao.quantization.fx._decomposed
from safetensors.torch import load_file
for path in sys.argv[1:]:
    given = load_file(path + ".given")
    model = torch.export.load(path).module()
    for name in sorted({key.rpartition(" ")[0] for key in given}):
        args = [given[key] for key in sorted(given) if key.startswith(f"{name} x")]
        assert torch.equal(model(*args), given[f"{name} y"]), (path, name)
print("equal")
"""


def branches(m: Any, flag: Tensor, x: Tensor) -> Tensor:
    """Run one of two bodies, and write to a buffer."""
    m.calls.add_(1)
    return torch.cond(flag, m.one, m.other, (x,)) + m.calls


BLOCKS = QuantizationSpec(
    torch.int8, PerBlockMinMaxObserver, -8, 7, torch.per_channel_symmetric, block_size=(4, 4)
)


def with_answers(model: Any, path: Path, *calls: tuple[Tensor, ...]) -> str:
    """Put what a model answers beside the archive of it."""
    given = {f"{n} x{i}": x.clone() for n, call in enumerate(calls) for i, x in enumerate(call)}
    given |= {f"{n} y": model(*call).detach().clone() for n, call in enumerate(calls)}
    save_file(given, f"{path}.given")
    return str(path)


def of_any_batch(path: Path) -> str:
    shapes = {"input": {0: Dim("batch", min=2, max=64)}}
    program = export(seeded(nn.Linear(3, 4)), randn(4, 3), dynamic_shapes=shapes)
    result = qompose.quantize(program, backends=toy(LINEAR), calibration=[randn(4, 3)])
    result.export(path)
    assert load_program(path).graph, "the command line reads it too"
    return with_answers(result.converted, path, (randn(2, 3),), (randn(64, 3),))


def of_bodies_and_state(path: Path) -> str:
    flag, x = torch.tensor(True), randn(2, 8)
    parts = {"one": nn.Linear(8, 8), "other": nn.Linear(8, 8), "calls": nn.Buffer(torch.zeros(()))}
    prepared = prepare(export(seeded(Model(branches, **parts)), flag, x), toy(LINEAR))
    for value in (flag, ~flag):
        prepared(value, x)
    converted = qompose.convert_pt2e(prepared)
    converted(flag, x)  # what is written is the state that was exported
    qompose.export_pt2(converted, path)
    converted.get_buffer("calls").zero_()
    return with_answers(converted, path, (flag, x), (~flag, x))


def of_operators_of_our_own(path: Path) -> str:
    config = QuantizationConfig(None, None, BLOCKS, name="blocks")
    program = export(seeded(nn.Linear(8, 8)), randn(2, 8))
    converted = convert(program, toy(LINEAR, config=config), randn(2, 8))
    assert "dequantize_per_block" in str(converted.graph)
    qompose.export_pt2(converted, path)
    return with_answers(converted, path, (randn(2, 8, seed=1),))


class TestExport:
    """torch alone opens what a converted model is written to, and computes the same with it."""

    @pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch 2.13 copies trees so
    def test_torch_alone_opens_them(self, tmp_path: Path) -> None:
        made = (of_any_batch, of_bodies_and_state, of_operators_of_our_own)
        paths = [make(tmp_path / f"{make.__name__}.pt2") for make in made]
        assert python("-c", READER, *paths).strip() == "equal"

    def test_types_without_a_name_in_files(self, tmp_path: Path) -> None:
        result = qompose.quantize(
            Model(lambda m, x: Unnamed(m.linear(x)), linear=nn.Linear(3, 3)),
            randn(2, 3), backends=toy(LINEAR), calibration=[randn(2, 3)],
        )  # fmt: skip
        with pytest.raises(ArtefactError, match="Unnamed"):
            result.export(tmp_path / "a.pt2")
        with pytest.raises(ArtefactError, match="Unnamed"):
            qompose.save(result.converted, tmp_path / "a.qompose")
        assert not list(tmp_path.iterdir())

    def test_what_is_not_written(self, tmp_path: Path) -> None:
        result = qompose.quantize(linear(), backends=toy(LINEAR), calibration=[randn(2, 3)])
        with pytest.raises(StageError, match="export_pt2"):
            qompose.export_pt2(result.model, tmp_path / "a.pt2")
        for path in (tmp_path / "a.qompose", 3):
            with pytest.raises(UserError, match=r"\.pt2"):
                qompose.export_pt2(result.converted, path)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())

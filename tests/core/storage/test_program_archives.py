# SPDX-License-Identifier: Apache-2.0
"""An archive of torch.export that could run code is refused before torch reads it."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from qompose import UserError
from qompose.storage.export_archive import load_program
from torch import Tensor, nn
from torch.export import Dim

from tests.core.preparation.test_zoo import assert_same_outputs
from tests.core.toy import randn, seeded
from tests.sampling import one_of
from tests.zoo import ZOO, ZooModel

WEIGHTS, MODEL = "data/weights/model_weights_config.json", "models/model.json"
EXAMPLES = "data/sample_inputs/model.pt"
COMMAND = "__import__('os').system('touch PWNED')"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, pair: dict[str, Tensor]) -> Tensor:
        return torch.cat([self.linear(x)] * 2) + pair["y"][: 2 * x.shape[0]]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The entries of an archive of a program with a dynamic size."""
    batch = Dim("batch", min=2, max=9)
    shapes = {"x": {0: batch}, "pair": {"y": {0: 2 * batch}}}
    inputs = (randn(3, 4), {"y": randn(6, 4)})
    path = tmp_path_factory.mktemp("sound") / "a.pt2"
    torch.export.save(torch.export.export(seeded(Net()), inputs, dynamic_shapes=shapes), path)
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


def at_call(data: Any, **facts: Any) -> None:
    graph(data)["nodes"][-1].update(facts)


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


FORGERIES: dict[str, tuple[str, Callable[[dict[str, bytes]], None]]] = {
    "pickled weight": ("weight is pickled", as_weight(use_pickle=True)),
    "weight elsewhere": ("weight is pickled", as_weight(path_name="../../etc/passwd")),
    "weight of no memory": ("has no memory", lambda e: (as_weight(path_name="weight_7")(e),
                            add("data/weights/weight_7")(e))[0]),
    "weights as text": ("not described", edited(WEIGHTS, lambda d: d.update(config=3))),
    "custom object": ("is pickled", add("data/constants/custom_obj_0", pickled(Evil()))),
    "opaque object": ("is pickled", add("data/constants/opaque_obj_0", pickled(Evil()))),
    "legacy weights": ("legacy payload", add("data/weights/model.pt", pickled(Evil()))),
    "legacy archive": ("legacy payload", add("serialized_state_dict.pt", pickled(Evil()))),
    "compiled code": ("compiled code", add("data/aotinductor/model/model.so", b"ELF")),
    "second program": ("second program", add("models/other.json", b"{}")),
    "something": ("does not write", add("data/xl_weights/a")),
    "examples": ("would unpickle", add(EXAMPLES, pickled(((Evil(),), {})))),
    "damaged examples": ("would unpickle", add(EXAMPLES, b"hello")),
    "attribute of torch": ("no operator", edited(MODEL, lambda d: at_call(d, target="torch.hub.load"))),
    "module of torch": ("no operator", edited(MODEL, lambda d: at_call(d, target="torch.os.system"))),
    "function": ("no operator", edited(MODEL, lambda d: at_call(d, target="_operator.methodcaller"))),
    "extension": ("no operator", edited(MODEL, lambda d: at_call(d, target="#a.b"))),
    "method of torch.ops": ("may call", edited(MODEL, lambda d: at_call(d, target="torch.ops.load_library"))),
    "operator on files": (
        "may call", edited(MODEL, lambda d: at_call(d, target="torch.ops.aten.from_file.default"))
    ),
    "unknown operator": (
        "not registered", edited(MODEL, lambda d: at_call(d, target="torch.ops.mylib.mine.default"))
    ),
    "operator as argument": (
        "no operator",
        edited(MODEL, lambda d: graph(d)["nodes"][-1]["inputs"].append(
            {"name": "f", "arg": {"as_operator": "torch.hub.load"}, "kind": 1})),
    ),
    "code for a size": ("more than a computation", as_size(COMMAND)),
    "attribute in a size": ("more than a computation", as_size("(1).__class__")),
    "code in a text": ("more than a computation", as_size(f'Max("{COMMAND}", 1)')),
    "other function": ("more than a computation", as_size("lambdify(x, y)")),
    "lambda": ("more than a computation", as_size("(lambda: 3)()")),
    "no expression": ("cannot be read", as_size("import os")),
    "large power": ("more than a computation", as_size("Pow(10, 10000000000)")),
    "tower": ("more than a computation", as_size("((2**60)**60)**60")),
    "large number": ("more than a computation", as_size("1" * 200)),
    "symbol": ("no name of a size", edited(MODEL, lambda d: d["range_constraints"].update(u10000000000={}))),
    "enumeration": ("import code", as_tree([{"__enum__": True, "fqn": "os.system", "name": "x"}])),
    "factory": (
        "import code",
        as_tree({"default_factory_module": "os", "default_factory_name": "abort", "dict_context": ["y"]}),
    ),
    "no tree": ("not described", as_tree(0) and edited(
        MODEL, lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(in_spec="[1"))),
    "no program": ("no models/model.json", lambda entries: entries.pop(MODEL) and None),
    "no JSON": ("is no JSON", add(MODEL, b"[")),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_refused(
    forgery: str, sound: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, change = FORGERIES[forgery]
    entries = dict(sound)
    change(entries)
    assert entries != sound
    write(entries, tmp_path / "b.pt2")
    monkeypatch.chdir(tmp_path)

    def seen(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torch saw it")

    monkeypatch.setattr(torch.export, "load", seen)
    with pytest.raises(
        UserError, match=rf"b\.pt2 is refused: .*{said}.*torch\.export\.load in Python"
    ):
        load_program(tmp_path / "b.pt2")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("kind", ["twice", "compressed", "two folders", "flipped", "cut"])
def test_archives_that_torch_does_not_write(
    kind: str, sound: dict[str, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "b.pt2"
    write(sound, path)
    if kind == "flipped":
        content = path.read_bytes()
        place = content.index(sound["data/weights/weight_0"])
        path.write_bytes(content[:place] + b"~" + content[place + 1 :])
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    else:
        method = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "a", method) as archive, pytest.MonkeyPatch.context() as patch:
            patch.setattr(zipfile.ZipFile, "_writecheck", lambda *_: None)
            root = "b" if kind == "two folders" else "a"
            name = MODEL if kind == "twice" else "extra/more"
            archive.writestr(f"{root}/{name}", b"{}")
    with pytest.raises(UserError, match=r"b\.pt2 (is refused|is no archive)"):
        load_program(path)


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


def test_guards_are_source_and_are_not_kept(sound: dict[str, bytes], tmp_path: Path) -> None:
    entries = dict(sound)
    edited(MODEL, lambda d: d.update(guards_code=[COMMAND]))(entries)
    write(entries, tmp_path / "b.pt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        program = load_program(tmp_path / "b.pt2")
        program.module()(randn(2, 4), {"y": randn(4, 4)})
        assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize(
    "model", one_of(20, [m for m in ZOO if "transformers" not in m.tags]), ids=str
)
def test_programs_are_read_as_they_were(model: ZooModel, tmp_path: Path) -> None:
    program = model.export(dynamic=model.dynamic_shapes is not None)
    torch.export.save(program, tmp_path / "a.pt2")
    inputs = model.inputs()
    with torch.no_grad():
        loaded = load_program(tmp_path / "a.pt2").module()
        assert_same_outputs(program.module()(*inputs), loaded(*inputs))

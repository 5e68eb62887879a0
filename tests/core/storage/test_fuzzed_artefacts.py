# SPDX-License-Identifier: Apache-2.0
"""Whatever a file says: it loads, and can be reported, or the error is one of ours and nothing is loaded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, strategies as st
from qompose import QomposeError
from qompose.storage import artifact, artifact_file
from torch.fx import GraphModule

from tests.core.offering import offered_by_a_package
from tests.core.storage.test_artefact import layers, mlp, net
from tests.core.toy import LINEAR, VIEW, ToyBackend, randn, toy

JUNK: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63, 10**30, 1.5, -0.5, "", "x", "a.b", "__class__", "\x00", "*",
    [], [[]], {}, [0] * 50, {"dict": []}, {"tuple": [1]}, {"float": "nan"}, {"float": "x"},
    {"device": "cuda"}, {"dtype": "float32"}, {"node": "x"}, {"slice": [1]}, {"callable": "f"},
    {"symbolic": ["int", "s0"]}, {"symbolic": ["int", "Pow(10, 1000000000)"]}, {"tensor": []},
)  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """What is in the file of a lowered model with a dynamic size, a buffer that it writes to, and arguments
    by name.
    """

    def forward(m: Any, x: torch.Tensor, *, shift: torch.Tensor) -> Any:
        m.seen.add_(1)
        y = layers(m, x)
        return {"y": torch.cat([y, y]) + shift[: 2 * y.shape[0]] * 2.5, "seen": m.seen * 1}

    model = net(forward, seen=torch.nn.Buffer(torch.zeros(4)))
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {"x": {0: batch}, "shift": {0: 2 * batch}}
    program = torch.export.export(
        model, (randn(6, 8),), {"shift": randn(12, 4)}, dynamic_shapes=shapes
    )
    prepared = qompose.prepare_pt2e(program, toy(LINEAR, VIEW))
    prepared(randn(6, 8), shift=randn(12, 4))
    path = tmp_path_factory.mktemp("sound") / "model"
    with offered_by_a_package(ToyBackend):
        qompose.save(qompose.lower(qompose.convert_pt2e(prepared)), path)
        yield artifact_file.read(path)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each part of JSON data."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(data[key], (*path, key))


def part(data: Any, path: Iterable[Any]) -> Any:
    return reduce(getitem, path, data)


@given(data=st.data())
def test_any_change(data: st.DataObject, sound: tuple[Any, Any]) -> None:
    body, blocks = sound
    known, forged = sorted(places(body), key=str), copy.deepcopy(body)
    *where, last = data.draw(st.sampled_from(known))
    owner, kind = part(forged, where), data.draw(st.sampled_from(["junk", "other", "gone", "more"]))
    if kind == "gone":
        del owner[last]
    elif kind == "more" and isinstance(owner, list):
        owner.insert(last, copy.deepcopy(data.draw(st.sampled_from(JUNK))))
    elif kind == "other":
        owner[last] = copy.deepcopy(part(body, data.draw(st.sampled_from(known))))
    else:
        owner[last] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", qompose.QomposeWarning)
        patch.setattr(artifact, "read_file", lambda path: (forged, blocks))
        try:
            loaded = qompose.load(Path("model"))
        except QomposeError:
            return
    if isinstance(loaded, GraphModule):  # another name of its method makes it one of several
        assert qompose.report(loaded).to_dict()
        assert str(loaded.meta["qompose"].plan)


def test_every_length_but_the_whole_is_refused(tmp_path: Path) -> None:
    qompose.save(mlp(), tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    ends = {*range(24), *range(24, len(content), 499), *range(len(content) - 24, len(content))}
    for end in sorted(ends):
        (tmp_path / "part").write_bytes(content[:end])
        with pytest.raises(qompose.errors.ArtefactError, match="part"):
            qompose.load(tmp_path / "part")

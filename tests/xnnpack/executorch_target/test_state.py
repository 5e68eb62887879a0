# SPDX-License-Identifier: Apache-2.0
"""Buffers that methods write to: one memory for all methods, initial values, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from qompose_xnnpack import XNNPACKQuantizer, get_symmetric_quantization_config
from qompose_xnnpack.executorch_target import lowering
from qompose_xnnpack.executorch_target.errors import ExecutorchTargetError
from torch import Tensor, nn
from torch.export import Dim

pytest.importorskip("executorch")

WIDTH, LENGTH = 8, 6
DYNAMIC = get_symmetric_quantization_config(is_dynamic=True, is_per_channel=True)


class Memory(nn.Module):
    """Writes to two buffers, one of which begins with values, and computes beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(LENGTH, WIDTH))
        self.register_buffer("count", torch.full((1,), 0.5))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.seen.index_copy_(0, at, self.linear(x))
        self.count.add_(1)
        return (self.seen.softmax(0) * self.count).sigmoid()


def inputs(first: int, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(first)
    return torch.randn(size, WIDTH), torch.arange(first, first + size)


PROMPT, TOKENS = inputs(0, 3), [inputs(place, 1) for place in range(3, LENGTH)]


def run(methods: Any) -> list[Tensor]:
    """A prompt and its tokens, and all of it once more: nothing is reset in between."""
    with torch.no_grad():
        return [
            methods[name](*x).clone()
            for name, x in 2 * [("prompt", PROMPT), *(("token", x) for x in TOKENS)]
        ]


def converted(model: nn.Module, **examples: Any) -> dict[str, Any]:
    programs = {name: torch.export.export(model.eval(), x) for name, x in examples.items()}
    quantizer = XNNPACKQuantizer().set_module_name("linear", DYNAMIC)
    return qompose.convert_pt2e(qompose.prepare_pt2e(programs, quantizer))


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    torch.manual_seed(0)
    return converted(Memory(), prompt=PROMPT, token=TOKENS[0])


@pytest.fixture(scope="module")
def expected(pair: dict[str, Any]) -> list[Tensor]:
    return run(qompose.lower(pair))


@pytest.fixture(scope="module")
def made(pair: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The program, and what whoever waited for it was told: how many stages, and their names."""
    told: list[Any] = []

    @contextmanager
    def stages(total: int) -> Iterator[Any]:
        told.append(total)
        yield told.append

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowering, "stages", stages)
        return qompose.lower(pair, "executorch"), told


@pytest.fixture(scope="module")
def program(made: tuple[Any, list[Any]]) -> Any:
    return made[0]


def test_each_stage_of_each_method_is_told(made: tuple[Any, list[Any]]) -> None:
    total, *names = made[1]
    assert total == len(names)
    for method in ("prompt", "token"):
        own = [name.removeprefix(f"{method}: ") for name in names if name.startswith(method)]
        assert own == [*lowering.STAGES]


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


class TestSharedState:
    def test_methods_read_what_others_wrote(self, program: Any, expected: Any) -> None:
        assert close(run(program.methods), expected)

    def test_copies_and_files_begin_anew(self, program: Any, expected: Any, tmp_path: Path) -> None:
        run(program.methods)
        path = program.save(tmp_path / "model.pte")
        for again in (
            copy.deepcopy(program),
            pickle.loads(pickle.dumps(program)),
            type(program).read(path),
        ):
            assert again.methods["token"].interface.writes == ("count", "seen")
            assert close(run(again.methods), expected)

    def test_the_runtime_alone_gives_the_same(
        self, program: Any, expected: Any, tmp_path: Path
    ) -> None:
        from executorch.runtime import Runtime

        loaded = Runtime.get().load_program(program.save(tmp_path / "model.pte"))
        methods = {name: loaded.load_method(name) for name in ("prompt", "token")}
        found = run({name: lambda *x, m=m: m.execute(x)[0] for name, m in methods.items()})
        assert close(found, expected)

    def test_the_report_says_how_another_runtime_has_to_load_it(self, program: Any) -> None:
        notes = qompose.report(program.methods["token"]).notes
        assert any("count" in note and "prompt" in note for note in notes)

    @pytest.mark.full
    def test_initial_values_of_one_method_are_kept(self, pair: Any) -> None:
        alone = qompose.lower(pair["prompt"], "executorch")
        model = qompose.lower(pair["prompt"])
        with torch.no_grad():
            assert close([alone(*PROMPT), alone(*PROMPT)], [model(*PROMPT), model(*PROMPT)])


@pytest.mark.full
class TestRefused:
    def test_a_delegate_with_a_constant_copy(self) -> None:
        class Reader(nn.Module):
            def __init__(self, memory: Memory) -> None:
                super().__init__()
                self.linear, self.seen = memory.linear, memory.seen

            def forward(self, x: Tensor) -> Tensor:
                return nn.functional.linear(self.linear(x), self.seen)

        memory = Memory().eval()
        methods = {
            **converted(memory, token=TOKENS[0]),
            **converted(Reader(memory), read=inputs(0, LENGTH)[:1]),
        }
        with pytest.raises(ExecutorchTargetError, match="'read' only reads the buffer 'seen'"):
            qompose.lower(methods, "executorch")

    def test_a_first_run_that_would_write(self) -> None:
        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)
                self.register_buffer("count", torch.zeros(1))

            def forward(self, x: Tensor) -> Tensor:
                self.count.add_(1)
                return self.conv(x).mean((2, 3)) * self.count

        x = torch.randn(2, 3, 8, 8)
        sizes = ({0: Dim("batch", max=8)},)
        program = torch.export.export(Mean().eval(), (x,), dynamic_shapes=sizes)
        prepared = qompose.prepare_pt2e(program, qompose.compose("xnnpack"))
        prepared(x)
        with pytest.raises(ExecutorchTargetError, match="count"):
            qompose.lower(qompose.convert_pt2e(prepared), "executorch")

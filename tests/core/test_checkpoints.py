# SPDX-License-Identifier: Apache-2.0
"""Weights that are quantized from files into a file: the bytes of the ordinary way, or nothing."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qompose
import torch
from hypothesis import given, settings, strategies as st
from qompose import QuantizationConfig, RuleQuantizer
from qompose.errors import CheckpointError, UncalibratedError, UnlearnedError, UserError
from qompose.observers import PerChannelMinMaxObserver
from qompose.program import disk
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.core.calibration.test_ranks import ROOT, together
from tests.core.toy import DYNAMIC, LINEAR, STATIC, WEIGHT, WEIGHT_ONLY, WEIGHT_PER_TENSOR, toy
from tests.processes import END_AT_ONCE, python
from tests.sampling import at_once


def weights(**options: Any) -> QuantizationConfig:
    return replace(WEIGHT_ONLY, weight=qompose.weight_spec(-8, 7, **options))


CONFIGS = {
    "channels": WEIGHT_ONLY,
    "dynamic": DYNAMIC,
    "tensor": replace(WEIGHT_ONLY, weight=WEIGHT_PER_TENSOR),
    "groups": weights(group_size=8),
    "zero points": weights(group_size=8, symmetric=False),
    "error": weights(range="mse"),
    "search": replace(weights(group_size=8), algorithms=("scale_search",)),
}
TOKENS = (torch.arange(6)[None],)


class Tied(nn.Module):
    """A table that two operators read, a layer that is called twice, and a buffer that is not saved."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.twice = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 96)
        self.norm = nn.LayerNorm(96)
        self.narrow = nn.Linear(96, 16, bias=False)
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("places", torch.arange(6.0, device="cpu"), persistent=False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) * self.scale
        x = x + self.places.to(x.dtype)[:, None]
        x = self.twice(self.twice(x).relu())
        x = self.narrow(self.norm(self.wide(x)))
        return self.head(x)  # type: ignore[no-any-return]


def real(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(3)
    return Tied().to(dtype).eval()


def meta(dtype: torch.dtype = torch.float32) -> Tied:
    with torch.device("meta"):
        return Tied().to(dtype).eval()


def quantizer(config: QuantizationConfig) -> RuleQuantizer:
    return toy(LINEAR, config=config)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Of a checkpoint: what is tied is there once."""
    return {n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}


def one_file(tensors: dict[str, Tensor], folder: Path) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def a_folder(tensors: dict[str, Tensor], folder: Path) -> Path:
    return one_file(tensors, folder).parent


def index(tensors: dict[str, Tensor], folder: Path) -> Path:
    files = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / disk.INDEX).write_text(json.dumps({"weight_map": files}))
    return folder / disk.INDEX


def sharded(tensors: dict[str, Tensor], folder: Path) -> Path:
    return index(tensors, folder).parent


def in_memory(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    del folder
    return tensors


FORMS = (one_file, a_folder, index, sharded, in_memory)


def ordinary(model: nn.Module, config: QuantizationConfig, path: Path) -> bytes:
    exported = torch.export.export(model, TOKENS)
    converted = qompose.convert_pt2e(qompose.prepare_pt2e(exported, quantizer(config)))
    qompose.save(converted, path / "ordinary.qompose")
    return (path / "ordinary.qompose").read_bytes()


def from_disk(
    checkpoint: Any, config: QuantizationConfig, path: Path, model: nn.Module | None = None
) -> bytes:
    written = path / "model.qompose"
    qompose.quantize_checkpoint(
        meta() if model is None else model,
        TOKENS,
        checkpoint=checkpoint,
        path=written,
        backends=quantizer(config),
    )
    return written.read_bytes()


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> Iterator[None]:
    """Each quantization collects garbage: what other tests left is looked at here, and not by each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From which size on tensors are kept on disk: these models are small."""
    monkeypatch.setattr(disk, "_SMALL", request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the checkpoint is; results are beside it."""
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"


CASES = [*itertools.product((2**16, 0), (torch.float32, torch.bfloat16), CONFIGS)]
EACH_CONFIG = [case for n, case in enumerate(CASES) if n % len(CONFIGS) % 4 == n // len(CONFIGS)]


@pytest.mark.parametrize(
    ("small", "dtype", "name"),
    at_once(CASES, *EACH_CONFIG),
    indirect=["small"],
    ids=str,
)
def test_the_file_is_that_of_the_ordinary_way(
    small: None, name: str, dtype: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    model, config = real(dtype), CONFIGS[name]
    checkpoint = one_file(state(model), folder)
    assert from_disk(checkpoint, config, tmp_path, meta(dtype)) == ordinary(model, config, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint", "model.qompose", "ordinary.qompose",
    ]  # fmt: skip
    loaded = qompose.load(tmp_path / "model.qompose")
    assert loaded(*TOKENS).shape == (1, 6, 48)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_checkpoint_gives_the_same(
    form: Callable[[dict[str, Tensor], Path], Any], folder: Path, tmp_path: Path
) -> None:
    model, config = real(), CONFIGS["groups"]
    found = from_disk(form(state(model), folder), config, tmp_path)
    assert found == ordinary(model, config, tmp_path)


def test_both_names_of_what_is_tied_may_be_there(folder: Path, tmp_path: Path) -> None:
    model, config = real(), CONFIGS["channels"]
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {"head.weight", "table.weight"} <= whole.keys()
    assert from_disk(one_file(whole, folder), config, tmp_path) == ordinary(model, config, tmp_path)
    whole["head.weight"] += 1
    with pytest.raises(CheckpointError) as refused:
        from_disk(one_file(whole, folder), config, tmp_path)
    assert refused.value.names == ("table.weight",)


ODD = st.sampled_from([0.0, -0.0, 1e-30, -3e38, 3e38, float("inf"), -float("inf"), 1e4, -7.5])


@settings(deadline=None, max_examples=10)  # each takes a second
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    odd=st.lists(st.tuples(st.integers(0, 16 * 96 - 1), ODD), max_size=6),
)
def test_odd_values_are_treated_alike(
    name: str, odd: list[tuple[int, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Masks leave a claim out, and zeros of both signs stay what they are."""
    path, model = tmp_path_factory.mktemp("odd"), real()
    with torch.no_grad():
        for place, value in odd:
            model.narrow.weight.view(-1)[place] = value
    checkpoint = one_file(state(model), path)
    found = from_disk(checkpoint, CONFIGS[name], path)
    assert found == ordinary(model, CONFIGS[name], path)


class Stopped(BaseException):
    """As of a key that was pressed."""


def counting(monkeypatch: pytest.MonkeyPatch, last: float = float("inf")) -> list[Path]:
    """Note the files that jobs write, and stop behind the last."""
    written: list[Path] = []
    write = disk._write

    def stopping(path: Path, made: Any) -> None:
        if len(written) >= last:
            raise Stopped
        write(path, made)
        written.append(path)

    monkeypatch.setattr(disk, "_write", stopping)
    return written


@pytest.mark.parametrize("last", [0, 1, 4, 7, 9])
def test_what_was_stopped_goes_on(
    last: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_SMALL", 0)
    model, config = real(), CONFIGS["zero points"]
    checkpoint = one_file(state(model), folder)
    with monkeypatch.context() as patch:
        first = counting(patch, last)
        with pytest.raises(Stopped):
            from_disk(checkpoint, config, tmp_path)
    assert len(first) == last
    assert not (tmp_path / "model.qompose").exists()
    with monkeypatch.context() as patch:
        second = counting(patch)
        found = from_disk(checkpoint, config, tmp_path)
    assert not {*first} & {*second}, "it was done before"
    assert found == ordinary(model, config, tmp_path)
    assert not (tmp_path / "model.qompose.partial").exists()


def test_work_of_another_task_is_not_gone_on_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = one_file(state(real()), folder)
    with monkeypatch.context() as patch:
        counting(patch, 3)
        with pytest.raises(Stopped):
            from_disk(checkpoint, CONFIGS["groups"], tmp_path)
    with pytest.raises(UserError):
        from_disk(checkpoint, CONFIGS["channels"], tmp_path)
    changed = state(real())
    changed["wide.weight"][5, 5] += 1  # which the fingerprint does not look at
    one_file(changed, folder)
    with pytest.raises(UserError):
        from_disk(checkpoint, CONFIGS["groups"], tmp_path)
    assert not (tmp_path / "model.qompose").exists()


def test_a_folder_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.qompose.partial").mkdir()
    (tmp_path / "model.qompose.partial" / "letter").write_text("dear")
    with pytest.raises(UserError):
        from_disk(one_file(state(real()), folder), CONFIGS["groups"], tmp_path)
    assert (tmp_path / "model.qompose.partial" / "letter").read_text() == "dear"


def _without(tensors: dict[str, Tensor]) -> str:
    del tensors["wide.bias"]
    return "wide.bias"


def _left_over(tensors: dict[str, Tensor]) -> str:
    tensors["adapter"] = torch.ones(3)
    return "adapter"


def _transposed(tensors: dict[str, Tensor]) -> str:
    tensors["wide.weight"] = tensors["wide.weight"].T.contiguous()
    return "wide.weight"


def _halved(tensors: dict[str, Tensor]) -> str:
    tensors["norm.weight"] = tensors["norm.weight"].half()
    return "norm.weight"


@pytest.mark.parametrize("spoil", [_without, _left_over, _transposed, _halved])
def test_what_does_not_fit_is_named_before_anything_is_written(
    spoil: Callable[[dict[str, Tensor]], str], folder: Path, tmp_path: Path
) -> None:
    tensors = state(real())
    name = spoil(tensors)
    with pytest.raises(CheckpointError) as refused:
        from_disk(one_file(tensors, folder), CONFIGS["groups"], tmp_path)
    assert refused.value.names == (name,)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_has_no_values_is_named(folder: Path, tmp_path: Path) -> None:
    model, tensors = meta(), state(real())
    model.places = torch.ones(6, device="meta")
    with pytest.raises(CheckpointError) as refused:
        from_disk(one_file(tensors, folder), CONFIGS["groups"], tmp_path, model)
    assert refused.value.names == ("places",)
    tensors["wide.weight"] = tensors["wide.weight"].to("meta")
    with pytest.raises(CheckpointError) as refused:
        from_disk(tensors, CONFIGS["groups"], tmp_path)
    assert refused.value.names == ("wide.weight",)


def _cut_off(folder: Path) -> Path:
    path = one_file(state(real()), folder)
    path.write_bytes(path.read_bytes()[:-8])
    return path


def _no_checkpoint(folder: Path) -> Path:
    (folder / "model.safetensors").write_text("hello")
    return folder / "model.safetensors"


def _no_index(folder: Path) -> Path:
    (folder / disk.INDEX).write_text("[1, 2]")
    return folder


def _two_files(folder: Path) -> Path:
    save_file({"a": torch.ones(1)}, folder / "a.safetensors")
    save_file({"b": torch.ones(1)}, folder / "b.safetensors")
    return folder


def _index_of_another_folder(folder: Path) -> Path:
    (folder / disk.INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    return folder


def _index_of_a_folder(folder: Path) -> Path:
    (folder / disk.INDEX).write_text('{"weight_map": {"a": ""}}')
    return folder


def _placed_elsewhere(folder: Path, places: dict[str, str]) -> str:
    name, file = next(iter(places.items()))
    places[name] = next(other for other in places.values() if other != file)
    return name


def _not_in_the_index(folder: Path, places: dict[str, str]) -> str:
    file = next(iter(places.values()))
    tensors = {**disk.mapped(folder / file), "more": torch.ones(3)}
    save_file({n: t.clone() for n, t in tensors.items()}, folder / file)
    return "more"


def _in_no_file(folder: Path, places: dict[str, str]) -> str:
    places["more"] = next(iter(places.values()))
    return "more"


def _in_two_files(folder: Path, places: dict[str, str]) -> str:
    name, file = next(iter(places.items()))
    other = next(other for other in places.values() if other != file)
    tensors = {**disk.mapped(folder / other), name: disk.mapped(folder / file)[name]}
    save_file({n: t.clone() for n, t in tensors.items()}, folder / other)
    return name


@pytest.mark.parametrize(
    "spoil", [_placed_elsewhere, _not_in_the_index, _in_no_file, _in_two_files]
)
def test_files_have_the_tensors_that_their_index_says(
    spoil: Callable[[Path, dict[str, str]], str], folder: Path, tmp_path: Path
) -> None:
    file = index(state(real()), folder)
    places = json.loads(file.read_text())["weight_map"]
    name = spoil(folder, places)
    file.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(CheckpointError) as refused:
        from_disk(file, CONFIGS["groups"], tmp_path)
    assert refused.value.names == (name,)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_of_the_index_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    file = index(state(real()), folder)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"part-1\.safetensors"):
        from_disk(file, CONFIGS["groups"], tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [_cut_off, _no_checkpoint, _no_index, _index_of_another_folder, _index_of_a_folder, _two_files],
)
def test_what_is_no_checkpoint_is_refused(
    spoil: Callable[[Path], Path], folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError):
        from_disk(spoil(folder), CONFIGS["groups"], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_needs_data_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    checkpoint = one_file(state(real()), folder)
    with pytest.raises(UncalibratedError) as refused:
        from_disk(checkpoint, STATIC, tmp_path)
    assert any("linear" in tensor for tensor in refused.value.tensors)
    for word in ("gptq", "sign_round", "awq"):
        with pytest.raises(UnlearnedError) as unlearned:
            from_disk(checkpoint, replace(WEIGHT_ONLY, algorithms=(word,)), tmp_path)
        assert unlearned.value.products == {word: 5}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_what_cannot_be_written_is_refused_first(folder: Path, tmp_path: Path) -> None:
    one_file(state(real()), folder)
    for place in (folder, tmp_path / "nowhere" / "model.qompose"):
        with pytest.raises(UserError):
            qompose.quantize_checkpoint(
                meta(), TOKENS, checkpoint=folder, path=place, backends=quantizer(WEIGHT_ONLY)
            )
    with pytest.raises(UserError):
        from_disk(folder, WEIGHT_ONLY, tmp_path, "a model")  # type: ignore[arg-type]
    with pytest.raises(UserError):
        from_disk(7, WEIGHT_ONLY, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("scratch", ["result", "a file"])
def test_scratch_is_a_folder_without_the_result(scratch: str, folder: Path, tmp_path: Path) -> None:
    one_file(state(real()), folder)
    (tmp_path / "result").mkdir()
    (tmp_path / "a file").touch()
    with pytest.raises(UserError, match=scratch):
        qompose.quantize_checkpoint(
            meta(), TOKENS, checkpoint=folder, path=tmp_path / "result" / "model.qompose",
            backends=quantizer(WEIGHT_ONLY), scratch=tmp_path / scratch,
        )  # fmt: skip
    assert not [*(tmp_path / "result").iterdir()]


def test_scratch_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    path = tmp_path / "model.qompose"
    qompose.quantize_checkpoint(
        meta(), TOKENS, checkpoint=one_file(state(real()), folder), path=path,
        backends=quantizer(WEIGHT_ONLY), scratch=tmp_path / "link",
    )  # fmt: skip
    assert path.exists() and not (tmp_path / "elsewhere").exists()


def test_a_checkpoint_is_not_overwritten(folder: Path) -> None:
    file = one_file(state(real()), folder)
    before = file.read_bytes()
    with pytest.raises(UserError, match="checkpoint"):
        qompose.quantize_checkpoint(
            meta(), TOKENS, checkpoint=folder, path=file, backends=quantizer(WEIGHT_ONLY)
        )
    assert file.read_bytes() == before


class Counting(PerChannelMinMaxObserver):
    """An observer of somebody else, which knows more than a range."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.times = 0.0

    def observe(self, x: Tensor) -> None:
        super().observe(x)
        self.times += float(x.abs().mean())

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        scale, zero_point = super().calculate_qparams()
        return scale * (1 + self.times), zero_point


def test_observers_of_others_keep_what_they_know(folder: Path, tmp_path: Path) -> None:
    weight = replace(WEIGHT, observer_or_fake_quant_ctr=Counting)
    config = replace(WEIGHT_ONLY, weight=weight)
    checkpoint = one_file(state(real()), folder)
    assert from_disk(checkpoint, config, tmp_path) == ordinary(real(), config, tmp_path)


def test_the_model_is_left_alone(folder: Path, tmp_path: Path) -> None:
    model = meta()
    from_disk(one_file(state(real()), folder), CONFIGS["groups"], tmp_path, model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.table.weight


BODY = """
import tests.core.test_checkpoints as t
from qompose.observers import PerChannelMinMaxObserver
from qompose.program import disk
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
disk._SMALL = 0
tensors = t.state(t.real())
mesh = init_device_mesh("cpu", (count,))
parts = {n: distribute_tensor(x, mesh, [Shard(0)]) for n, x in tensors.items()}
made = []
write = disk._write
disk._write = lambda path, data: (made.append(path.name), write(path, data))
for name, checkpoint in (("file", Path(out, "checkpoint")), ("parts", parts)):
    Path(out, name).mkdir(exist_ok=True)
    made.clear()
    dist.barrier()
    qompose.quantize_checkpoint(
        t.meta(), t.TOKENS, checkpoint=checkpoint, path=Path(out, name, "model.qompose"),
        backends=t.quantizer(t.CONFIGS["zero points"]), timeout=30,
    )
    print(len(made), flush=True)
if rank == 1:
    def fails(path, data):
        raise ValueError("the disk is red")
    disk._write = fails
Path(out, "failed").mkdir(exist_ok=True)
dist.barrier()
try:
    qompose.quantize_checkpoint(
        t.meta(), t.TOKENS, checkpoint=Path(out, "checkpoint"),
        path=Path(out, "failed", "model.qompose"),
        backends=t.quantizer(t.CONFIGS["zero points"]), timeout=30,
    )
except Exception as error:
    print(type(error).__name__, "the disk is red" in str(error), flush=True)
"""


MEMORY = """
import sys
from pathlib import Path
import qompose, torch
from qompose.observers import PerChannelMinMaxObserver
from qompose.program import disk
from safetensors.torch import save_file
from tests.core.test_checkpoints import CONFIGS, quantizer
from torch import nn

def anonymous():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

LAYERS, folder = 24, Path(sys.argv[1])
part = {"weight": torch.randn(1024, 1024).bfloat16()}
save_file({f"{n}.weight": part["weight"] + n for n in range(LAYERS)}, folder / "in.safetensors")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, False) for _ in range(LAYERS))).bfloat16()
seen, write = [], disk._write

def watched(path, made):
    write(path, made)
    seen.append(anonymous())

disk._write = watched
qompose.quantize_checkpoint(
    model, (torch.ones(1, 1024).bfloat16(),), checkpoint=folder / "in.safetensors",
    path=folder / "out.qompose", backends=quantizer(CONFIGS["zero points"]),
)
print(max(seen) - seen[0])
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells of it")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Of 48 MB of weights, ranges are 24 MB, integers too, scales and zero points 36 MB, in all.

    glibc gives nothing back of the heap that it grows at will, so what a tensor takes is asked of the system
    and given back at once.
    """
    script = tmp_path / "script.py"
    script.write_text(MEMORY + END_AT_ONCE)
    path = os.pathsep.join([str(ROOT), *sys.path])
    grown = python(
        script,
        tmp_path,
        cwd=ROOT,
        PYTHONPATH=path,
        OMP_NUM_THREADS="1",
        MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )
    assert float(grown) < 2


def test_processes_share_the_work_and_write_what_one_writes(folder: Path, tmp_path: Path) -> None:
    """Of a file, and of a state dict whose tensors they hold in parts; and they fail together."""
    one_file(state(real()), folder)
    expected = ordinary(real(), CONFIGS["zero points"], tmp_path)
    done = together(tmp_path, BODY, count=3)
    assert [process.returncode for process in done] == [0, 0, 0], done[0].stderr + done[1].stderr
    for name in ("file", "parts"):
        assert (tmp_path / name / "model.qompose").read_bytes() == expected
        assert [path.name for path in (tmp_path / name).iterdir()] == ["model.qompose"]
    said = [process.stdout.split("\n") for process in done]
    assert all(int(lines[0]) >= 2 for lines in said), "each did a share"
    assert [lines[2] for lines in said] == ["UserError True", "ValueError True", "UserError True"]
    assert not (tmp_path / "failed" / "model.qompose").exists()

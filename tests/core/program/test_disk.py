# SPDX-License-Identifier: Apache-2.0
"""Tensors that are moved to temporary files."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from qompose.errors import QomposeWarning
from qompose.program.disk import Pages
from torch import Tensor

MANY = 400
TYPES = torch.int8, torch.uint8, torch.int16, torch.int32


def integers(dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(0, 100, (MANY, MANY), dtype=dtype)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files_open() -> int:
    return len([*Path("/proc/self/fd").iterdir()]) if Path("/proc/self/fd").exists() else 0


def test_many_tensors_take_one_file_that_nobody_sees(temporary: Path) -> None:
    given = [make(integers(dtype)) for dtype in TYPES for make in (Tensor.t, lambda x: x[::2])]
    # What follows an odd number of bytes begins at a multiple of eight.
    given += [torch.ones(2**16 + 3, dtype=torch.int8), integers(torch.int32)]
    before = files_open()
    pages = Pages(x.numel() * x.element_size() for x in given)
    moved = [pages.moved(x) for x in given]
    assert files_open() <= before + 2  # the file, and its mapping
    assert not list(temporary.iterdir())
    del pages
    for one, other in zip(moved, given, strict=True):
        assert one is not other
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.equal(other)
    del moved, one
    assert files_open() == before


def test_what_is_written_to_one_is_in_no_other() -> None:
    pages, given = Pages([2 * MANY**2]), integers()
    one, other = pages.moved(given), pages.moved(given)
    one.fill_(5)
    assert bool((one == 5).all())
    assert other.equal(given)


def test_small_tensors_stay_in_memory() -> None:
    small = torch.arange(100)
    assert Pages([2**20]).moved(small) is small


def test_all_that_finds_no_room_is_counted() -> None:
    one, others = integers(), [integers(torch.int16), integers(torch.int32)]
    pages = Pages(x.numel() * x.element_size() for x in (one, *others))
    assert pages.moved(one) is not one
    left = sum(x.nbytes for x in others)
    full = mock.patch.object(pages, "_file", FullDisk())
    with pytest.warns(QomposeWarning, match=str(left)), full:
        assert pages.moved(others[0]) is others[0]
    assert pages.moved(others[1]) is others[1]


@pytest.mark.parametrize("when", ["made", "written"])
def test_without_room_they_stay_in_memory_with_one_warning(when: str, temporary: Path) -> None:
    given = integers()
    if when == "made":
        temporary.rmdir()
    pages = None if when == "made" else Pages([given.numel()])
    full = mock.patch.object(pages, "_file", FullDisk()) if pages else nullcontext()
    with pytest.warns(QomposeWarning) as said, full:
        pages = pages or Pages([given.numel()])
        assert pages.moved(given) is given
        assert pages.moved(given) is given
    assert len(said) == 1


class FullDisk(io.RawIOBase):
    """A file that takes nothing."""

    def seek(self, *_: object) -> int:
        return 0

    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

# SPDX-License-Identifier: Apache-2.0
"""Files that are whole or not there, and paths that lead to something else than a file."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest
from qompose import UserError
from qompose.files import destination, draft_of


class TestDraft:
    """A file takes its place at once, or nothing has happened."""

    def test_a_finished_one_takes_the_place(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pte"
        path.write_text("old")
        with draft_of(path) as draft:
            assert draft.name == "model.pte"  # some writers put it into the file, or add to it
            draft.write_text("new")
            assert path.read_text() == "old"
        assert path.read_text() == "new"
        assert list(tmp_path.iterdir()) == [path]

    def test_a_place_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "nowhere" / "model.pte"
        with pytest.raises(FileNotFoundError) as caught, draft_of(path) as draft:
            draft.write_text("new")
        assert caught.value.filename == str(path)
        assert caught.value.errno == errno.ENOENT

    def test_a_folder_that_only_may_be_read(self, tmp_path: Path) -> None:
        """Root may write anywhere, so the system's words are simulated."""
        path = tmp_path / "model.pte"
        with pytest.raises(PermissionError) as caught, draft_of(path) as draft:
            raise PermissionError(errno.EACCES, "Permission denied", str(draft))
        assert caught.value.filename == str(path)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_says_for_which_file(self, tmp_path: Path) -> None:
        """What writes to an open file does not name it."""
        path = tmp_path / "model.pte"
        with pytest.raises(OSError) as caught, draft_of(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        assert (caught.value.filename, caught.value.errno) == (str(path), errno.ENOSPC)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_a_failed_one_leaves_nothing(self, tmp_path: Path, error: type[BaseException]) -> None:
        path = tmp_path / "model.pte"
        path.write_text("old")
        with pytest.raises(error), draft_of(path) as draft:
            draft.write_text("half")
            raise error
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


class TestSeveralFiles:
    """A program and what it names: all take their places, or nothing has happened."""

    def test_what_was_written_beside_a_draft_is_beside_its_place(self, tmp_path: Path) -> None:
        path = tmp_path / "model.onnx"
        with draft_of(path) as draft:
            data = draft.with_name(f"{draft.name}.data")
            draft.write_text(data.name)
            data.write_text("weights")
            assert len(list(tmp_path.iterdir())) == 1  # the folder
        assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
        assert (tmp_path / path.read_text()).read_text() == "weights"

    def test_nothing_is_replaced_where_one_place_is_no_file(self, tmp_path: Path) -> None:
        path, blocked = tmp_path / "model.onnx", tmp_path / "model.onnx.data"
        path.write_text("old")
        blocked.mkdir()
        with pytest.raises(UserError, match=r"model\.onnx\.data"), draft_of(path) as draft:
            for name in ("model.onnx", "model.onnx.data", "model.onnx.a"):
                draft.with_name(name).write_text("new")
        assert path.read_text() == "old"
        assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}

    def test_a_failed_one_leaves_none_of_them(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError), draft_of(tmp_path / "model.onnx") as draft:
            draft.with_name("model.onnx.data").write_text("weights")
            raise ValueError
        assert list(tmp_path.iterdir()) == []


class TestDestination:
    """What a path means as a place to write."""

    def test_a_link_stays_and_its_file_is_replaced(self, tmp_path: Path) -> None:
        real, link = tmp_path / "far" / "real", tmp_path / "link"
        real.parent.mkdir()
        real.write_text("old")
        link.symlink_to(real)
        with draft_of(link) as draft:
            assert draft.parent.parent == real.parent  # maybe on another disk than the link
            draft.write_text("new")
        assert link.is_symlink()
        assert real.read_text() == link.read_text() == "new"

    def test_a_link_to_nothing_yet(self, tmp_path: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to("later")
        with draft_of(link) as draft:
            draft.write_text("new")
        assert link.is_symlink()
        assert (tmp_path / "later").read_text() == "new"

    @pytest.mark.parametrize(
        ("kind", "linked"),
        [("pipe", False), ("socket", False), ("directory", False), ("pipe", True)],
    )
    def test_what_is_no_file_is_refused_and_stays(
        self, tmp_path: Path, kind: str, linked: bool
    ) -> None:
        path = tmp_path / "place"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as end:
                end.bind(str(path))
        else:
            path.mkdir()
        before = path.stat()
        asked = tmp_path / "link" if linked else path
        if linked:
            asked.symlink_to(path)
        with pytest.raises(UserError, match=kind), draft_of(asked):
            pytest.fail("the work was begun")
        assert path.stat() == before

    @pytest.mark.parametrize("bits", [stat.S_IFCHR, stat.S_IFBLK], ids=["character", "block"])
    def test_devices_are_refused(
        self, tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No test opens a real one: what replaces it would be gone for the whole machine."""
        facts = os.stat_result((bits | 0o666, *[0] * 9))
        monkeypatch.setattr(Path, "stat", lambda path: facts)
        with pytest.raises(UserError, match="device"):
            destination(tmp_path / "device")

    def test_links_in_a_ring_are_an_os_error(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to("b")
        (tmp_path / "b").symlink_to("a")
        with pytest.raises(OSError, match="symbolic links"):
            destination(tmp_path / "a")

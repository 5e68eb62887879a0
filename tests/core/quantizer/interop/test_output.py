# SPDX-License-Identifier: Apache-2.0
"""Behind a fence what is printed is kept and told; warnings and log records go where they always go."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from typing import Any

import pytest
from qompose.quantizer.interop.process_state import fenced

from tests.logs import Listen


class FailedError(Exception):
    """What code behind the fence raises."""


class TestOutput:
    """What is printed is kept; warnings and log records are not."""

    def test_it_is_kept_and_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        with fenced() as effects:
            print("\nfirst\nsecond\n")
            sys.stdout.writelines(["third\n"])
            print("to stderr", file=sys.stderr, flush=True)
        print("after")
        assert capsys.readouterr() == ("after\n", "")
        assert effects == ["wrote 3 lines to stdout: first", "wrote 1 line to stderr: to stderr"]

    def test_a_long_line_is_cut(self) -> None:
        with fenced() as effects:
            print("x" * 1000)
        assert effects == [f"wrote 1 line to stdout: {'x' * 100}..."]

    def test_blank_lines_are_not_worth_telling(self) -> None:
        with fenced() as effects:
            print("\n \n")
        assert effects == []

    def test_all_of_it_is_logged_for_who_asks(self, logged: Listen) -> None:
        heard = logged(logging.DEBUG, "qompose")
        with fenced():
            print("first\nsecond")
        assert "what was printed to stdout: first\nsecond" in heard.text

    def test_it_appears_where_the_code_raises(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(FailedError), fenced() as effects:
            print("a hint")
            print("another", file=sys.stderr)
            raise FailedError
        assert capsys.readouterr() == ("a hint\n", "another\n")
        assert effects == []

    def test_the_stand_in_has_what_a_stream_has(self) -> None:
        outside = sys.stdout
        with fenced():
            assert sys.stdout is not outside
            assert sys.stdout.encoding == outside.encoding
            assert sys.stdout.isatty() == outside.isatty()
            with pytest.raises(TypeError):
                sys.stdout.write(b"bytes")  # type: ignore[arg-type]
        assert sys.stdout is outside

    def test_a_program_without_a_console(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdout", None)
        with fenced() as effects:
            print("lost, as outside")
        assert effects == [] and sys.stdout is None

    def test_what_other_threads_print_appears(self, capsys: pytest.CaptureFixture[str]) -> None:
        with fenced() as effects:
            thread = threading.Thread(target=print, args=("from a thread",))
            thread.start()
            thread.join()
        assert effects == []
        assert capsys.readouterr().out == "from a thread\n"

    def test_who_holds_on_to_the_stand_in_writes_to_the_stream(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        logger = logging.getLogger("a package behind a fence")
        logger.propagate = False
        with fenced():
            logger.addHandler(logging.StreamHandler())
        logger.warning("later")
        assert capsys.readouterr().err == "later\n"

    def test_a_fence_in_a_fence(self, capsys: pytest.CaptureFixture[str]) -> None:
        with fenced() as outer:
            print("outside")
            with fenced() as inner:
                print("inside")
        assert (outer, inner) == (
            ["wrote 1 line to stdout: outside"],
            ["wrote 1 line to stdout: inside"],
        )
        assert capsys.readouterr().out == ""

    def test_redirection_inside_works(self) -> None:
        text = io.StringIO()
        with fenced() as effects, contextlib.redirect_stdout(text):
            print("caught")
        assert (text.getvalue(), effects) == ("caught\n", [])


class TestWarnings:
    """A warning is for the user, whoever emits it."""

    def test_it_arrives(self) -> None:
        with pytest.warns(UserWarning, match="mind") as caught, fenced() as effects:
            warnings.warn("mind", UserWarning, stacklevel=1)
        assert effects == [] and caught[0].filename == __file__

    def test_it_is_printed_where_warnings_are(self, capsys: pytest.CaptureFixture[str]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with contextlib.ExitStack() as stack:
                shown = _as_outside_of_pytest(stack)
                with fenced() as effects:
                    warnings.warn("mind", UserWarning, stacklevel=1)
                assert warnings.showwarning is shown
        assert "UserWarning: mind" in capsys.readouterr().err
        assert effects == []

    def test_as_an_error_it_is_raised_where_it_was_made_one(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning), fenced():
                warnings.warn("mind", UserWarning, stacklevel=1)

    def test_filters_that_were_set_inside_decide_inside_only(self) -> None:
        def warn() -> None:
            warnings.warn("mind", UserWarning, stacklevel=1)

        with pytest.warns(UserWarning) as caught:
            with fenced():
                warnings.simplefilter("ignore")
                warn()
            assert len(caught) == 0
            warn()
        assert len(caught) == 1

    def test_a_place_that_has_warned_inside_warns_again(self) -> None:
        """By the default filter a place warns once; what was shown by other filters does not count."""

        def warn() -> None:
            warnings.warn("mind", UserWarning, stacklevel=1)

        with pytest.warns(UserWarning) as caught:
            with fenced():
                warnings.simplefilter("default")
                warn()
            warn()
        assert len(caught) == 2

    def test_log_records_that_nobody_handles_are_printed_as_ever(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.root, "handlers", [])
        last_resort = logging.lastResort
        with fenced() as effects:
            logging.getLogger("some package").warning("mind")
        assert logging.lastResort is last_resort
        assert (effects, capsys.readouterr().err) == ([], "mind\n")


def _as_outside_of_pytest(stack: contextlib.ExitStack) -> object:
    """Let warnings be printed: pytest keeps those of tests to itself."""

    def shown(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    stack.callback(setattr, warnings, "showwarning", warnings.showwarning)
    warnings.showwarning = shown  # type: ignore[assignment]
    return shown

# SPDX-License-Identifier: Apache-2.0
"""`backends --check` in processes of their own, of plugins that end, crash, hang and print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.core.cli.test_cli import run

NOISY = """
import atexit, os, warnings, qompose
print('{"status": "usable"}')
os.write(1, b'[]')
warnings.warn('at import')
atexit.register(print, 'at exit')

class B(qompose.backend.Backend):
    name = "noisy"
    api_version = 1

@qompose.backend.hookimpl
def qompose_backend():
    return B()
"""


@dataclass(frozen=True)
class Plugin:
    """The source of a plugin's module, and what its row says that is wrong."""

    name: str
    source: str
    problem: str = ""


FORKS = """
import subprocess, sys, time  # a child that keeps the pipes open
subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])
time.sleep(600)
"""
PLUGINS = (
    Plugin("aborts", "import os; os.abort()", "SIGABRT"),
    Plugin("crashes", "import os; os._exit(3)", "code 3"),
    Plugin("exits", "import sys; sys.exit('goodbye')", "SystemExit: goodbye"),
    Plugin("hangs", "import time; time.sleep(600)", "3 s"),
    Plugin("asks", "input('continue? ')", "EOFError"),
    Plugin("forks", FORKS, "3 s"),
)


def environment(folder: Path) -> dict[str, str]:
    for plugin in (*PLUGINS, Plugin("noisy", NOISY)):
        (folder / f"plug_{plugin.name}.py").write_text(plugin.source)
        info = folder / f"plug_{plugin.name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: plug-{plugin.name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[qompose]\n{plugin.name} = plug_{plugin.name}\n")
    names = ",".join(plugin.name for plugin in PLUGINS)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("QOMPOSE")}
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": paths, "QOMPOSE_PLUGINS": names}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "qompose", "backends", "--check", "--json", *arguments]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    return run(*command("--timeout", "3"), env=environment(tmp_path_factory.mktemp("site")))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_each_has_its_row(checked: subprocess.CompletedProcess[str], plugin: Plugin) -> None:
    """A problem is exit code 1."""
    assert checked.returncode == 1
    rows = {row["name"]: row for row in json.loads(checked.stdout)["backends"]}
    assert list(rows) == sorted(p.name for p in PLUGINS)
    row = rows[plugin.name]
    assert row["distribution"] == f"plug-{plugin.name}"
    assert row["status"] == "broken"
    assert plugin.problem in row["problem"]


def test_what_a_plugin_prints_is_not_taken_for_its_row(tmp_path: Path) -> None:
    """Nor does a warning at import make it a broken one."""
    done = run(*command(), env={**environment(tmp_path), "QOMPOSE_PLUGINS": "noisy"})
    (row,) = json.loads(done.stdout)["backends"]
    assert (row["status"], row["problem"], done.returncode) == ("usable", None, 0)


def is_gone(process: int) -> bool:
    """Whether a process has ended; one that nobody waits for may still be listed, as a zombie."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_an_interrupt_ends_the_checks_too(tmp_path: Path) -> None:
    variables = {**environment(tmp_path), "QOMPOSE_PLUGINS": "hangs"}
    started = tmp_path / "started"
    (tmp_path / "plug_hangs.py").write_text(
        f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    process = subprocess.Popen(
        command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed, said) == (130, "", "qompose: interrupted\n")
    assert is_gone(int(started.read_text()))


def test_several_are_checked_at_a_time(tmp_path: Path) -> None:
    """Each waits until the other was started, so one after the other they would never end."""
    variables = {**environment(tmp_path), "QOMPOSE_PLUGINS": "hangs,noisy"}
    for name, other in (("hangs", "noisy"), ("noisy", "hangs")):
        (tmp_path / f"plug_{name}.py").write_text(
            "import time\nfrom pathlib import Path\n"
            f"Path({str(tmp_path / name)!r}).touch()\n"
            f"while not Path({str(tmp_path / other)!r}).exists():\n    time.sleep(0.01)\n"
            f"raise ImportError('met')"
        )
    done = run(*command("--timeout", "60"), env=variables)
    problems = [row["problem"] for row in json.loads(done.stdout)["backends"]]
    assert len(problems) == 2 and all("met" in problem for problem in problems)

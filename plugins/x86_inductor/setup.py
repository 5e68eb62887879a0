# SPDX-License-Identifier: Apache-2.0
"""The version is the core's; `~=` requires a core of the same minor version, at least as new."""

import re
from pathlib import Path

from setuptools import setup

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "PKG-INFO"  # source distributions have it
source = RECORDED if RECORDED.exists() else FOLDER.parents[1] / "pyproject.toml"
match = re.search(r"^version\W+([\w.]+)", source.read_text("utf-8"), re.IGNORECASE | re.MULTILINE)
if match is None:
    raise SystemExit(f"{source} has no version")
setup(version=match[1], install_requires=[f"qompose~={match[1]}", "torch"])

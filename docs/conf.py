# SPDX-License-Identifier: Apache-2.0
"""The site: Sphinx reads the Markdown pages of the repository as they stand.

`python -m tox run -e docs` builds it. The root of the sources is the repository and not this folder, so
that links from a page to README.md or to a result of a benchmark are the same on a code host and here.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs.building import navigation  # noqa: E402 - behind the path that it is found by

project = "qompose"
copyright = "the qompose authors, Apache-2.0"
version = release = version_of("qompose")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "docs.building.navigation",
    "docs.building.names",
    "docs.building.docstrings",
    "docs.building.sources",
]
root_doc = navigation.ROOT_PAGE
include_patterns = [f"{page}.md" for page in navigation.pages(ROOT)]
exclude_patterns = [".*", "build", "site", "core", "tests", "examples", "**/*.egg-info"]

myst_heading_anchors = 4  # the anchors that code hosts make, for links to a heading
myst_url_schemes = {"http": None, "https": None, "source": "{{path}}"}  # see docs.building.sources

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "qompose"
html_copy_source = False
html_show_sphinx = False
html_favicon = "figures/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["building/root"]
pygments_style = "tango"
pygments_dark_style = "monokai"

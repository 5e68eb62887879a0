# SPDX-License-Identifier: Apache-2.0
"""Composable int8 quantization for PyTorch 2: quantizers are plugins, and compose.

The public names stand in `__init__.pyi`. They are imported when they are first used, so `import qompose`
does not import torch.
"""

from __future__ import annotations

from pkgutil import iter_modules
from typing import Any

import lazy_loader

_load, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
_submodules = {module.name for module in iter_modules(__path__)} & {*_names}

__all__ = [name for name in _names if name not in _submodules]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib_metadata import version

        return version("qompose")
    return _load(name)

# SPDX-License-Identifier: Apache-2.0
"""Empty stand-ins for modules of vendors that two quantizers' packages import and never call here.

MediaTek's and NXP's quantizers stand in the same packages as their compilers, which need an SDK that only
the vendor gives out. What annotates uses nothing of it; what runs with these is annotation alone, and is
marked so.
"""

from __future__ import annotations

import sys
import types
from typing import Any

MEDIATEK = (
    "mtk_converter", "mtk_converter.python", "mtk_converter.python.converters",
    "mtk_converter.python.converters.pytorch", "mtk_converter.python.converters.pytorch.importer_v2",
    "mtk_neuron",
)  # fmt: skip
NXP = (
    "eiq_neutron_sdk",
    "eiq_neutron_sdk.neutron_converter",
    "eiq_neutron_sdk.neutron_library_utils",
)


def stand_in(*names: str) -> None:
    """Make modules of these names importable, with nothing in them; parents come before children."""
    for name in names:
        if name not in sys.modules:
            module: Any = types.ModuleType(name)
            module.__path__ = []
            sys.modules[name] = module
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)


def neutron_target() -> Any:
    """NXP's description of a Neutron-C target, without asking the vendor's converter what that is."""
    stand_in(*NXP)
    from executorch.backends.nxp.backend import neutron_target_spec as specs

    target = specs.NeutronTargetSpec.__new__(specs.NeutronTargetSpec)
    target.neutron_target_info = specs.NeutronTargetNeutronC()
    return target

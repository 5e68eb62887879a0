# SPDX-License-Identifier: Apache-2.0
"""What authors of backends use: rules, patterns, kernels, targets, and the discovery of plugins.

Names are imported when they are first used, so listing plugins does not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

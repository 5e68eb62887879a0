# SPDX-License-Identifier: Apache-2.0
"""What most backends need: rows of rule tables, guards, configurations, and parts of kernels.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# SPDX-License-Identifier: Apache-2.0
"""The ``executorch`` target: a converted model becomes a program for the ExecuTorch runtime.

``target`` is the last step of lowering that core calls; it leaves the work to ``lowering``. ExecuTorch is
an optional dependency, imported at first use by ``executorch_imports``.
"""

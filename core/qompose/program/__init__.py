# SPDX-License-Identifier: Apache-2.0
"""An exported program as an fx graph: read it, copy it, rewrite it, call it."""

# SPDX-License-Identifier: Apache-2.0
"""`python -m qompose`."""

from qompose.cli import main

raise SystemExit(main())

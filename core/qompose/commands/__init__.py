# SPDX-License-Identifier: Apache-2.0
"""The commands of `qompose`: a module each, with `add_arguments` and `run`. Importing them needs no torch."""

# SPDX-License-Identifier: Apache-2.0
"""The second stage: data through a prepared model, and what it saw as a value."""

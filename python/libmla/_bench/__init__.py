# SPDX-License-Identifier: Apache-2.0
"""Holds what `libmla plot` and `libmla report` share."""

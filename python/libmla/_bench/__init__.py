# SPDX-License-Identifier: Apache-2.0
"""What `libmla plot` and `libmla report` share."""

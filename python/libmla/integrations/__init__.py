# SPDX-License-Identifier: Apache-2.0
"""libmla inside other software. Each module imports the software that it is for; importing libmla imports none."""

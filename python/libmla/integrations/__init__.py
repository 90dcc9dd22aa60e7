# SPDX-License-Identifier: Apache-2.0
"""Lets other software run on libmla. Each module imports the software that it is for; importing libmla imports none."""

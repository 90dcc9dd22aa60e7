# SPDX-License-Identifier: Apache-2.0
"""Runs the command line as `python -m libmla`."""

import sys

from libmla.cli import main

sys.exit(main())

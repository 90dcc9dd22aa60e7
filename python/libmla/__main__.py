# SPDX-License-Identifier: Apache-2.0
"""`python -m libmla`: the command line."""

import sys

from libmla.cli import main

sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Language models on text: what the commands `generate` and `eval` are made of. Imports no framework by itself."""

# SPDX-License-Identifier: Apache-2.0
"""Holds what the commands `generate` and `eval` are made of, which run language models on text. Imports no framework by
itself."""

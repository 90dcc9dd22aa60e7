# SPDX-License-Identifier: Apache-2.0
"""Defines what the calls of flash_mla_with_kvcache share: a plan, once the first of them has made it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import libmla
from libmla import _core

_new = _core.function("flash_mla_metadata")
_info = _core.function("flash_mla_metadata_info")
_UNMADE: Any = object()


class FlashMLASchedMeta:
    """Holds a plan, which the first call of flash_mla_with_kvcache that is given it makes, and the next ones use.

    Calls that share it have equal shapes and equal values of cache_seqlens. On a GPU, a first call inside a captured
    graph puts the planning into the graph. Setting `tile_scheduler_metadata` or `config` to None, or `have_initialized`
    to False, plans again; other values make no plan. The two tensors are made when they are first asked for.
    """

    @dataclasses.dataclass
    class Config:
        """Holds what the calls that share a plan have in common; topk and extra_ fields are None if not given."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int

        causal: bool
        is_fp8_kvcache: bool
        topk: int | None

        extra_page_block_size: int | None
        extra_topk: int | None

        enable_batch_invariant: bool = False

    __slots__ = ("__weakref__", "_handle", "_num_splits", "_number", "_plan", "_workspace")
    _handle: Any  # the library's object, which holds the plan; None before the first call
    _number: int  # by which torch's graphs name it; with a handle
    _plan: tuple[libmla.Plan, Config] | None
    _workspace: torch.Tensor | None
    _num_splits: torch.Tensor | None

    def __init__(self) -> None:
        self._handle = None

    def _start(self) -> Any:
        """Makes a new handle, without a plan, and returns it."""
        handle = _new()
        self._number = _core.number(self)
        self._plan, self._workspace, self._num_splits = None, _UNMADE, _UNMADE
        self._handle = handle  # last: whoever sees it reads the others
        return handle

    def _planned(self) -> tuple[libmla.Plan, Config] | None:
        if self._handle is None:
            return None
        if self._plan is None and (info := _info(self._handle)) is not None:
            handle, operation, config = info
            self._plan = libmla.Plan._of(str(operation), handle), FlashMLASchedMeta.Config(*config)
        return self._plan

    @property
    def plan(self) -> libmla.Plan | None:
        """Returns the plan, or None if there is none yet."""
        planned = self._planned()
        return None if planned is None else planned[0]

    @property
    def config(self) -> Config | None:
        """Returns what the plan was made for, or None if there is none yet."""
        planned = self._planned()
        return None if planned is None else planned[1]

    @config.setter
    def config(self, value: Config | None) -> None:
        if value is None:
            self._handle = None

    @property
    def have_initialized(self) -> bool:
        """Returns whether there is a plan. Setting it to False forgets the plan."""
        return self._planned() is not None

    @have_initialized.setter
    def have_initialized(self, value: bool) -> None:
        if not value:
            self._handle = None

    @property
    def tile_scheduler_metadata(self) -> torch.Tensor | None:
        """Returns the plan's workspace, or None if there is no plan yet. Setting it to None forgets the plan."""
        if (plan := self.plan) is None:
            return None
        if self._workspace is _UNMADE:
            self._workspace = torch.from_dlpack(plan.workspace)
        return self._workspace

    @tile_scheduler_metadata.setter
    def tile_scheduler_metadata(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._handle = None
        else:
            self._workspace = value

    @property
    def num_splits(self) -> torch.Tensor | None:
        """Returns [1] int32, the partial states to be merged; or None if there is no plan yet."""
        if (plan := self.plan) is None:
            return None
        if self._num_splits is _UNMADE:
            device = torch.from_dlpack(plan.workspace).device
            self._num_splits = torch.full((1,), plan.num_splits, dtype=torch.int32, device=device)
        return self._num_splits

    @num_splits.setter
    def num_splits(self, value: torch.Tensor | None) -> None:
        self._num_splits = value

    def __repr__(self) -> str:
        return f"FlashMLASchedMeta(have_initialized={self.have_initialized}, config={self.config})"

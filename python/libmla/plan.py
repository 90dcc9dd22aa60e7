# SPDX-License-Identifier: Apache-2.0
"""Decisions for a batch, made once and run often."""

from __future__ import annotations

from typing import Any

from . import _core, ops
from .context import Context
from .types import Tensor

_new = _core.function("plan")
_draft = _core.function("draft")
_info = _core.function("plan_info")
_workspace = _core.function("plan_workspace")


class _Draft:
    """In the place of a plan: what the operation would run, it plans."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle


class Plan:
    """How one batch is run: the backend, the split of every request over the workers, and a workspace.

    Made by the class methods, each of which takes the arguments of the operation of its name and looks at shapes and
    lengths only (on a GPU: shapes), not at page numbers and data. Then ``libmla.decode(..., plan=plan)`` runs it, as
    often as wanted, while shapes and lengths stay as they were, and so do causal, window_left, the presence of a draft
    tree, context_parallel and batch_invariant. Page numbers, data, sm_scale and the other options may change.

    On a GPU a plan is a kernel in the current stream: a CUDA graph may capture it. After lengths changed in place, plan
    again, with :meth:`update`, or replay a graph that holds it.

    Two more arguments:
        workspace: memory of any element type for the plan to own, on the device of the tensors (on the CPU where a GPU
            is emulated); None: from the framework of the tensors. What is too small is an error that says how many
            bytes are needed.
        context: a :class:`libmla.Context`, which runs of the plan use too.
    """

    __slots__ = ("__weakref__", "_handle", "_number", "_operation", "_workspace")
    _handle: Any
    _number: int
    _operation: str
    _workspace: Tensor | None

    def __init__(self) -> None:
        raise TypeError("Plan: expected one of Plan.decode, decode_sparse, prefill and prefill_sparse to make it")

    @classmethod
    def decode(cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any) -> Plan:
        """A plan for :func:`libmla.decode` with these arguments."""
        return cls._make("decode", workspace, context, args, named)

    @classmethod
    def decode_sparse(
        cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any
    ) -> Plan:
        """A plan for :func:`libmla.decode_sparse` with these arguments."""
        return cls._make("decode_sparse", workspace, context, args, named)

    @classmethod
    def prefill(cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any) -> Plan:
        """A plan for :func:`libmla.prefill` with these arguments."""
        return cls._make("prefill", workspace, context, args, named)

    @classmethod
    def prefill_sparse(
        cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any
    ) -> Plan:
        """A plan for :func:`libmla.prefill_sparse` with these arguments."""
        return cls._make("prefill_sparse", workspace, context, args, named)

    @classmethod
    def _make(
        cls,
        operation: str,
        workspace: Tensor | None,
        context: Context | None,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Plan:
        plan = cls.__new__(cls)
        plan._handle = _new(None if context is None else context._handle, workspace)
        plan._operation = operation
        plan._workspace = workspace
        plan._number = _core.number(plan)
        plan.update(*args, **named)
        return plan

    def update(self, *args: Any, **named: Any) -> None:
        """Plans another batch of the same operation, with the arguments of the operation.

        In the same workspace; one that is the plan's own is replaced if it is too small, but not on a GPU, where
        graphs may hold its address.
        """
        getattr(ops, self._operation)(*args, plan=_Draft(_draft(self._handle)), **named)

    @property
    def operation(self) -> str:
        """The operation that the plan is for, such as ``"decode"``."""
        return self._operation

    @property
    def backend(self) -> str:
        """The row that will run."""
        return str(_info(self._handle)[0])

    def describe(self) -> str:
        """Tasks, splits, rows per task: for people."""
        return str(_info(self._handle)[1])

    @property
    def num_tasks(self) -> int:
        """Pieces of work for the threads; 0 on a GPU."""
        return int(_info(self._handle)[2])

    @property
    def num_splits(self) -> int:
        """Partial states to be merged; 0 if no request is split."""
        return int(_info(self._handle)[3])

    @property
    def workspace(self) -> Tensor:
        """The memory that the plan owns: the caller's tensor, or one of tvm_ffi (which speaks DLPack)."""
        return _workspace(self._handle) if self._workspace is None else self._workspace

    def __repr__(self) -> str:
        return f"Plan({self._operation}: {self.describe()})"

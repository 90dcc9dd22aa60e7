# SPDX-License-Identifier: Apache-2.0
"""Defines Plan, which holds the decisions for a batch: they are made once and run often."""

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
    """Stands in the place of a plan: an operation that gets it plans what it would run."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle


class Plan:
    """Says how one batch is run: the backend, the split of every request over the workers, and a workspace.

    It is made by the class methods, each of which takes the arguments of the operation of its name and looks at shapes
    and lengths only (on a GPU: shapes), not at page numbers and data. Then ``libmla.decode(..., plan=plan)`` runs it,
    as often as wanted, while shapes and lengths stay as they were, and so do causal, window_left, compute, the
    presence of a draft tree, context_parallel, batch_invariant and lse_inf_without_keys. Page numbers, data, sm_scale
    and the other options may change.

    On a GPU a plan is a kernel in the current stream: a CUDA graph may capture it. After lengths changed in place, plan
    again, with :meth:`update`, or replay a graph that holds it.

    The class methods take two more arguments:

    - ``workspace``: memory of any element type for the plan to own, on the device of the tensors (on the CPU where a
      GPU is emulated); None: from the framework of the tensors. What is too small is an error that says how many bytes
      are needed.
    - ``context``: a :class:`libmla.Context`, which runs of the plan use too.
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
        """Makes a plan for :func:`libmla.decode` with these arguments."""
        return cls._make("decode", workspace, context, args, named)

    @classmethod
    def decode_sparse(
        cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any
    ) -> Plan:
        """Makes a plan for :func:`libmla.decode_sparse` with these arguments."""
        return cls._make("decode_sparse", workspace, context, args, named)

    @classmethod
    def prefill(cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any) -> Plan:
        """Makes a plan for :func:`libmla.prefill` with these arguments."""
        return cls._make("prefill", workspace, context, args, named)

    @classmethod
    def prefill_sparse(
        cls, *args: Any, workspace: Tensor | None = None, context: Context | None = None, **named: Any
    ) -> Plan:
        """Makes a plan for :func:`libmla.prefill_sparse` with these arguments."""
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
        plan = cls._of(operation, _new(None if context is None else context._handle, workspace), workspace)
        plan.update(*args, **named)
        return plan

    @classmethod
    def _of(cls, operation: str, handle: Any, workspace: Tensor | None = None) -> Plan:
        """Returns the plan that a handle of the library stands for."""
        plan = cls.__new__(cls)
        plan._handle = handle
        plan._operation = operation
        plan._workspace = workspace
        plan._number = _core.number(plan)
        return plan

    def update(self, *args: Any, **named: Any) -> None:
        """Plans another batch of the same operation, with the arguments of the operation.

        The workspace stays the same; one that is the plan's own is replaced if it is too small, but not on a GPU, where
        graphs may hold its address.
        """
        getattr(ops, self._operation)(*args, plan=_Draft(_draft(self._handle)), **named)

    @property
    def operation(self) -> str:
        """Returns the operation that the plan is for, such as ``"decode"``."""
        return self._operation

    @property
    def backend(self) -> str:
        """Returns the backend that will run, a row of the operation's table."""
        return str(_info(self._handle)[0])

    def describe(self) -> str:
        """Returns the tasks, splits and rows per task as text for people."""
        return str(_info(self._handle)[1])

    @property
    def num_tasks(self) -> int:
        """Returns the number of pieces of work for the threads; 0 on a GPU."""
        return int(_info(self._handle)[2])

    @property
    def num_splits(self) -> int:
        """Returns the number of partial states to be merged; 0 if no request is split."""
        return int(_info(self._handle)[3])

    @property
    def workspace(self) -> Tensor:
        """Returns the memory that the plan owns: the caller's tensor, or one of tvm_ffi (which speaks DLPack)."""
        return _workspace(self._handle) if self._workspace is None else self._workspace

    def __repr__(self) -> str:
        return f"Plan({self._operation}: {self.describe()})"

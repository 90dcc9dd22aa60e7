# SPDX-License-Identifier: Apache-2.0
"""The operations as operators of torch, so that torch.compile and torch.export keep them in their graphs.

Importing this module registers ``torch.ops.libmla.decode`` and its like. Nobody has to: under torch.compile and
torch.export the functions of libmla (``libmla.decode``) turn into them by themselves, while eager calls keep the short
way. A process that only loads an exported program imports it first.

An operator has the arguments of the function of its name, in torch's types: a KvCache becomes its fields
(``cache_format``, ``cache_kv``, ``cache_ckv``, ...), a pair two tensors (``q`` and ``q_pe``), a Plan or Context its
number; ``out`` is called ``o``. ``torch.ops.libmla.<name>`` makes its outputs, all of them; those that the caller did not ask for are empty.
``torch.ops.libmla.<name>_out`` writes into tensors that are given, which are annotated as mutated, as are the caches
that are written: functionalization sees it. Operators without an output of their own have one form only.

Operators run on torch's current stream, take outputs and workspaces from torch's allocator, and neither wait nor copy
to the host: ``mode="reduce-overhead"`` and ``torch.cuda.graph`` may capture them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import _call, _core, ops
from .types import KvCache

_Arguments = dict[str, Any]
_Tensors = dict[str, torch.Tensor]

_CACHE_TENSORS = ("kv", "ckv", "kpe", "ckv_scale", "kpe_scale")
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}

_TABLE = "Tensor? block_table=None, Tensor? kv_indptr=None, Tensor? kv_indices=None"
_OPTIONS = 'Tensor? attn_sink=None, float logits_soft_cap=0.0, str lse_base="e", bool batch_invariant=False'
_POSITIONS = "bool causal=True, SymInt window_left=-1, Tensor? alibi_slopes=None"
_QUERY = "SymInt? d_v=None, Tensor? q_scale=None, Tensor? o_scale=None"
_PLANNED = "ScalarType? out_dtype=None, SymInt plan=0, SymInt context=0"


def _cache_schema(name: str, written: bool = False) -> str:
    """The fields of a cache. Those that are written are annotated, each with an alias set of its own."""
    fields = []
    for alias, field in zip("abcde", _CACHE_TENSORS, strict=True):
        mark = f"({alias}!)" if written and field != "kpe_scale" else ""
        fields.append(f"Tensor{mark}? {name}_{field}")
    return f"str {name}_format, {', '.join(fields)}, SymInt {name}_page_size, bool {name}_power_of_two_scales"


@dataclass(frozen=True)
class _Output:
    """A tensor that an operation writes.

    Attributes:
        flag: the argument by which a caller asks for it; empty: always.
        returned: whether the function returns it by itself. Others are scratch, or the second part of a pair.
        dtype: element type of the empty tensor that stands for it when nobody asked for it.
    """

    name: str
    flag: str = ""
    returned: bool = True
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class _Operator:
    """How an operation looks to torch.

    Attributes:
        inputs: schema of the arguments other than outputs and flags.
        outputs: what it writes beside caches.
        caches: arguments that are a Cache. Their fields stand in the schema.
        pairs: arguments that may be a pair of tensors. The second one is `<name>_pe`.
        make: new outputs for given inputs, by name.
    """

    inputs: str
    outputs: tuple[_Output, ...] = ()
    caches: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    make: Callable[[_Arguments], _Tensors] = lambda _: {}

    @property
    def flags(self) -> tuple[str, ...]:
        """Arguments of the function that ask for outputs and are nothing else."""
        return tuple(output.flag for output in self.outputs if output.flag.startswith("return_"))

    @property
    def writes_inputs(self) -> bool:
        """Whether there is but one form: it writes caches, and outputs where they are given."""
        return "!" in self.inputs


# What new outputs look like, as in the library.


def _output_dtype(a: _Arguments, given: torch.dtype) -> torch.dtype:
    if a.get("out_dtype") is not None:
        return a["out_dtype"]
    return torch.bfloat16 if given in (torch.float8_e4m3fn, torch.uint8) else given


def _value_width(a: _Arguments) -> int:
    q, q_pe, ckv = a["q"], a["q_pe"], a["cache_ckv"]
    if a.get("d_v") is not None:
        return a["d_v"]
    if a["cache_format"] == "fp8_dsv4":
        return q.shape[-1] + (0 if q_pe is None else q_pe.shape[-1])
    if q_pe is not None:
        return q.shape[-1]
    if ckv is not None:
        return ckv.shape[-1]
    return 1 << (int(q.shape[-1]).bit_length() - 1)


def _attention(a: _Arguments, d_v: int) -> _Tensors:
    q = a["q"]
    return {
        "o": q.new_empty((*q.shape[:2], d_v), dtype=_output_dtype(a, q.dtype)),
        "max_logits": q.new_empty(q.shape[:2], dtype=torch.float32),
        "lse": q.new_empty(q.shape[:2], dtype=torch.float32),
    }


def _merged(a: _Arguments) -> _Tensors:
    if a.get("in_place"):
        raise ValueError("merge_states: out and lse: expected tensors, since in_place is set, got none or one")
    states = a["partial_o"]
    return {
        "o": states.new_empty(states.shape[1:], dtype=_output_dtype(a, states.dtype)),
        "lse": states.new_empty(states.shape[1:3], dtype=torch.float32),
    }


def _rotated(a: _Arguments) -> _Tensors:
    q, q_pe = a["q"], a["q_pe"]
    dtype = a.get("q_out_dtype") or (q.dtype if a.get("q_scale") is None else torch.float8_e4m3fn)
    return {"q_out": q.new_empty((*q.shape[:2], q.shape[2] + q_pe.shape[2]), dtype=dtype)}


def _gathered(a: _Arguments) -> _Tensors:
    some = a["cache_kv"] if a["cache_kv"] is not None else a["cache_ckv"]
    width = _core.function("row_width")(a["cache_format"]) if a["cache_format"] else 0
    if width == 0:
        kpe = a["cache_kpe"]
        width = some.shape[-1] + (0 if kpe is None or a["cache_kv"] is not None else kpe.shape[-1])
    floats = some.dtype in (torch.float16, torch.bfloat16)
    rows = a.get("num_rows")
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    dtype = a.get("out_dtype") or (some.dtype if floats else torch.bfloat16)
    return {"o": some.new_empty((rows, width), dtype=dtype)}


def _integers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _csr(a: _Arguments) -> _Tensors:
    table = a["block_table"]
    requests, pages = table.shape
    return {"kv_indptr": _integers(table, requests + 1), "kv_indices": _integers(table, requests * pages)}


def _slots(a: _Arguments) -> _Tensors:
    indices = a["indices"]
    return {"slots": _integers(indices, *indices.shape), "valid_count": _integers(indices, indices.shape[0])}


def _logits(a: _Arguments) -> torch.Tensor:
    width = a.get("max_kv_len")
    if width is None:
        pages = a["block_table"] if a.get("block_table") is not None else a["kv_indices"]
        width = pages.shape[-1] * a["page_size"]
    return a["q"].new_empty((a["q"].shape[0], width), dtype=torch.float32)


def _selected(a: _Arguments) -> _Tensors:
    q = a["q"]
    return {
        "logits": _logits(a),
        "slots": _integers(q, q.shape[0], a["k"]),
        "valid_count": _integers(q, q.shape[0]),
    }


# libmla's `out`: dynamo takes arguments of that name for what torch's own operators have, and refuses views.
_OUT = _Output("o")
_LSE = _Output("lse", "return_lse")
_VALID_COUNT = _Output("valid_count", "return_valid_count", dtype=torch.int32)
_INDEXER = (
    "Tensor q, Tensor weights, Tensor cache, {}SymInt page_size, Tensor kv_len, "
    f"{_TABLE}, Tensor? qo_indptr=None, bool causal=True, SymInt? max_kv_len=None, SymInt context=0"
)

_OPERATORS = {
    "decode": _Operator(
        f"Tensor q, Tensor? q_pe, {_cache_schema('cache')}, Tensor kv_len, float sm_scale, {_TABLE}, "
        "Tensor? qo_indptr=None, Tensor? tree_mask=None, Tensor? tree_parents=None, SymInt[]? context_parallel=None, "
        f"{_POSITIONS}, {_OPTIONS}, {_QUERY}, {_PLANNED}",
        (_OUT, _LSE),
        caches=("cache",),
        pairs=("q",),
        make=lambda a: _attention(a, _value_width(a)),
    ),
    "decode_sparse": _Operator(
        f"Tensor q, Tensor? q_pe, {_cache_schema('cache')}, Tensor indices, {_cache_schema('extra_cache')}, "
        "float sm_scale, Tensor? topk_length=None, str? topk_length_per=None, Tensor? extra_indices=None, "
        "Tensor? extra_topk_length=None, str? extra_topk_length_per=None, "
        f"Tensor? qo_indptr=None, {_OPTIONS}, {_QUERY}, {_PLANNED}",
        (_OUT, _LSE),
        caches=("cache", "extra_cache"),
        pairs=("q",),
        make=lambda a: _attention(a, _value_width(a)),
    ),
    "prefill": _Operator(
        "Tensor q, Tensor k, Tensor v, Tensor qo_indptr, Tensor kv_indptr, float sm_scale, "
        f"{_POSITIONS}, {_OPTIONS}, {_PLANNED}",
        (_OUT, _LSE),
        make=lambda a: _attention(a, a["v"].shape[-1]),
    ),
    "prefill_sparse": _Operator(
        "Tensor q, Tensor kv, Tensor indices, float sm_scale, Tensor? topk_length=None, SymInt d_v=512, "
        f"{_OPTIONS}, {_PLANNED}",
        (_OUT, _Output("max_logits", "return_max_logits"), _LSE),
        make=lambda a: _attention(a, a.get("d_v", 512)),
    ),
    "merge_states": _Operator(
        'Tensor partial_o, Tensor partial_lse, str lse_base="e", bool in_place=False, ScalarType? out_dtype=None, '
        "SymInt context=0",
        (_OUT, _Output("lse")),
        make=_merged,
    ),
    "append": _Operator(
        f"Tensor rows, Tensor? rows_pe, Tensor slot_mapping, {_cache_schema('cache', written=True)}, SymInt context=0",
        caches=("cache",),
        pairs=("rows",),
    ),
    "append_rope": _Operator(
        f"Tensor ckv, Tensor kpe, Tensor slot_mapping, {_cache_schema('cache', written=True)}, Tensor cos_sin, "
        "Tensor positions, Tensor? q=None, Tensor? q_pe=None, bool interleaved=True, Tensor? q_scale=None, "
        "ScalarType? q_out_dtype=None, SymInt context=0",
        (_Output("q_out", "q"),),
        caches=("cache",),
        pairs=("q",),
        make=_rotated,
    ),
    "gather": _Operator(
        f"{_cache_schema('cache')}, Tensor kv_len, Tensor out_indptr, {_TABLE}, Tensor? token_start=None, "
        "SymInt? num_rows=None, ScalarType? out_dtype=None, SymInt context=0",
        (_OUT, _Output("o_pe", returned=False)),
        caches=("cache",),
        pairs=("o",),
        make=_gathered,
    ),
    "copy_pages": _Operator(
        f"{_cache_schema('from_cache')}, Tensor from_pages, {_cache_schema('to_cache', written=True)}, "
        "Tensor to_pages, SymInt context=0",
        caches=("from_cache", "to_cache"),
    ),
    "block_table_to_csr": _Operator(
        "Tensor block_table, Tensor kv_len, SymInt page_size, SymInt context=0",
        (_Output("kv_indptr"), _Output("kv_indices")),
        make=_csr,
    ),
    "physical_slots": _Operator(
        f"Tensor indices, Tensor kv_len, SymInt page_size, {_TABLE}, Tensor? topk_length=None, "
        "Tensor? qo_indptr=None, SymInt[]? context_parallel=None, bool compact=False, SymInt context=0",
        (_Output("slots"), _VALID_COUNT),
        make=_slots,
    ),
    "append_indexer": _Operator(
        "Tensor k, Tensor slot_mapping, Tensor(a!) cache, SymInt page_size, bool power_of_two_scales=True, "
        "SymInt context=0"
    ),
    "indexer_logits": _Operator(_INDEXER.format(""), (_Output("logits"),), make=lambda a: {"logits": _logits(a)}),
    "top_k": _Operator(
        "Tensor logits, SymInt k, Tensor? lengths=None, SymInt context=0",
        (_Output("indices"),),
        make=lambda a: {"indices": _integers(a["logits"], a["logits"].shape[0], a["k"])},
    ),
    "indexer_top_k": _Operator(
        _INDEXER.format("SymInt k, ") + ", SymInt? latent_page_size=None, Tensor? latent_block_table=None, "
        "Tensor? latent_kv_indptr=None, Tensor? latent_kv_indices=None",
        (_Output("logits", returned=False), _Output("slots"), _VALID_COUNT),
        make=_selected,
    ),
}


def _number(thing: Any) -> int:
    """What stands in a graph for a Plan or a Context."""
    if thing is None:
        return 0
    if torch.compiler.is_exporting():
        raise ValueError("plan and context live in this process: an exported program cannot hold them")
    return thing._number


def _numbered(number: int) -> Any:
    if number == 0:
        return None
    found = _core.numbered.get(number)
    if found is None:
        raise RuntimeError("the Plan or Context that the compiled function was made with is gone")
    return found


def _dtype(dtype: Any) -> torch.dtype | None:
    return (_DTYPES.get(dtype) or getattr(torch, dtype)) if isinstance(dtype, str) else dtype


def _flatten_cache(name: str, cache: Any) -> _Arguments:
    rest: tuple[str, int, bool]
    if type(cache) is KvCache:
        tensors = (cache.kv, cache.ckv, cache.kpe, cache.ckv_scale, cache.kpe_scale)
        rest = (cache.format, cache.page_size, cache.power_of_two_scales)
    else:
        tensors = (None, *cache, None, None) if type(cache) is tuple else (cache, None, None, None, None)
        rest = ("", 0, True)
    flat = {f"{name}_{field}": tensor for field, tensor in zip(_CACHE_TENSORS, tensors)}
    flat.update(zip((f"{name}_format", f"{name}_page_size", f"{name}_power_of_two_scales"), rest))
    return flat


def _flatten(operator: _Operator, arguments: _Arguments) -> _Arguments:
    """The function's arguments as the operator's."""
    flat = {}
    for given, value in arguments.items():
        name = "o" if given == "out" else given
        if name in operator.caches:
            flat.update(_flatten_cache(name, value))
        elif name in operator.pairs and type(value) is tuple:
            flat[name], flat[name + "_pe"] = value
        elif name in ("plan", "context"):
            flat[name] = _number(value)
        elif name.endswith("dtype"):
            flat[name] = _dtype(value)
        else:
            flat[name] = value
    for name in operator.caches:
        if name not in arguments:
            flat.update(_flatten_cache(name, None))
    for name in operator.pairs:
        flat.setdefault(name + "_pe", None)
    return flat


def _unflatten(operator: _Operator, flat: _Arguments) -> _Arguments:
    """The operator's arguments as the function's."""
    arguments = dict(flat)
    for name in operator.caches:
        fields = {field: arguments.pop(f"{name}_{field}") for field in (*_CACHE_TENSORS, "format")}
        page_size, powers = arguments.pop(f"{name}_page_size"), arguments.pop(f"{name}_power_of_two_scales")
        if fields["format"]:
            arguments[name] = KvCache(**fields, page_size=page_size, power_of_two_scales=powers)
        elif fields["ckv"] is not None:
            arguments[name] = (fields["ckv"], fields["kpe"])
        elif fields["kv"] is not None:
            arguments[name] = fields["kv"]
    for name in operator.pairs:
        second = arguments.pop(name + "_pe", None)
        if second is not None:
            arguments[name] = (arguments[name], second)
    for name in ("plan", "context"):
        if name in arguments:
            arguments[name] = _numbered(arguments[name])
    if arguments.get("context_parallel") is not None:
        arguments["context_parallel"] = tuple(arguments["context_parallel"])
    if "o" in arguments:
        arguments["out"] = arguments.pop("o")
    return arguments


def _wanted(operator: _Operator, flat: _Arguments) -> list[str]:
    """The outputs that a call makes or writes."""

    def asked_for(output: _Output) -> bool:
        flag = flat.get(output.flag) if output.flag else True
        return output.returned and flag is not None and flag is not False

    names = [output.name for output in operator.outputs if flat.get(output.name) is not None or asked_for(output)]
    return [*names, "lse"] if "max_logits" in names and "lse" not in names else names


def _traced(name: str, operator: _Operator) -> Callable[..., Any]:
    """The function of that name for tensors that are being traced."""
    parameters = tuple(inspect.signature(getattr(ops, name)).parameters)
    outputs, flags, writes_inputs = operator.outputs, operator.flags, operator.writes_inputs

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(parameters, args)), **kwargs}
        flat = _flatten(operator, arguments)
        if torch.is_grad_enabled():
            _call._refuse_gradients(name, tuple(flat.values()))
        wanted = _wanted(operator, flat)
        given = {output.name: flat.pop(output.name, None) for output in outputs}
        asked = {flag: flat.pop(flag) for flag in flags if flag in flat}
        returned = [output.name for output in outputs if output.returned]
        if not writes_inputs and all(value is None for value in given.values()):
            made = getattr(torch.ops.libmla, name)(**flat, **asked)
            results = dict(zip(returned, made if len(returned) > 1 else (made,)))
        else:
            fresh = operator.make(flat) if any(given[output] is None for output in wanted) else {}
            results = {output: fresh[output] if given[output] is None else given[output] for output in wanted}
            getattr(torch.ops.libmla, name if writes_inputs else name + "_out")(**flat, **results)
        if type(arguments.get("out")) is tuple:
            results["o"] = arguments["out"]
        answer = [results[output] for output in returned if output in wanted]
        return tuple(answer) if len(answer) > 1 else answer[0] if answer else None

    call.__name__ = name
    call.__doc__ = f"libmla.{name} for tensors that are being traced."
    return call


def _bound(schema: Any) -> Callable[..., _Arguments]:
    """By which a kernel names its arguments. torch leaves away those that have their default value."""
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def bind(args: tuple[Any, ...], kwargs: _Arguments) -> _Arguments:
        return {**defaults, **dict(zip(defaults, args)), **kwargs}

    return bind


def _register_making(library: torch.library.Library, name: str, operator: _Operator) -> None:
    """The form that makes its outputs."""
    returned = [output for output in operator.outputs if output.returned]
    flags = "".join(f", bool {flag}=False" for flag in operator.flags)
    library.define(f"{name}({operator.inputs}{flags}) -> ({', '.join(['Tensor'] * len(returned))})", tags=_TAGS)
    function = getattr(ops, name).__wrapped__
    bind = _bound(getattr(torch.ops.libmla, name).default._schema)

    def collect(flat: _Arguments, results: Callable[[str], torch.Tensor]) -> Any:
        wanted = _wanted(operator, flat)
        device = next(value for value in flat.values() if isinstance(value, torch.Tensor)).device
        collected = tuple(
            results(output.name) if output.name in wanted else torch.empty(0, dtype=output.dtype, device=device)
            for output in returned
        )
        return collected if len(collected) > 1 else collected[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        flat = bind(args, kwargs)
        result = function(**_unflatten(operator, flat))
        made = iter(result if type(result) is tuple else (result,))
        return collect(flat, lambda _: next(made))

    def fake(*args: Any, **kwargs: Any) -> Any:
        flat = bind(args, kwargs)
        made = operator.make(flat)
        return collect(flat, lambda output: made[output])

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"libmla::{name}", fake, lib=library)


def _register_writing(library: torch.library.Library, name: str, operator: _Operator) -> None:
    """The form that writes into given tensors."""
    form = name if operator.writes_inputs else name + "_out"
    outputs = "".join(f", Tensor({alias}!)? {output.name}=None" for alias, output in zip("wxyz", operator.outputs))
    library.define(f"{form}({operator.inputs}{outputs}) -> ()", tags=_TAGS)
    function = getattr(ops, name).__wrapped__
    bind = _bound(getattr(torch.ops.libmla, form).default._schema)

    def run(*args: Any, **kwargs: Any) -> None:
        function(**_unflatten(operator, bind(args, kwargs)))

    library.impl(form, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"libmla::{form}", lambda *args, **kwargs: None, lib=library)


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_LIBRARY = torch.library.Library("libmla", "DEF")

for _name, _operator in _OPERATORS.items():
    if _operator.outputs and not _operator.writes_inputs:
        _register_making(_LIBRARY, _name, _operator)
    if _operator.outputs or _operator.writes_inputs:
        _register_writing(_LIBRARY, _name, _operator)
    globals()[_name] = _traced(_name, _operator)

__all__ = list(_OPERATORS)

# SPDX-License-Identifier: Apache-2.0
"""Registers the operations as operators of torch, so that torch.compile and torch.export keep them in their graphs.

Importing this module registers ``torch.ops.libmla.decode`` and its like. Nobody has to: under torch.compile and
torch.export the functions of libmla (``libmla.decode``) turn into them by themselves, while eager calls keep the short
way. A process that only loads an exported program imports it first.

An operator has the arguments of the function of its name, in torch's types, which are made from its signature: a
KvCache becomes its fields (``cache_format``, ``cache_kv``, ``cache_ckv``, ...), a pair two tensors (``q`` and
``q_pe``), arguments of another operation theirs (``append_ckv``, ``append_cache_format``, ...), a Plan or Context its
number; ``out`` is called ``o``. ``torch.ops.libmla.<name>`` makes its outputs, all of
them; those that the caller did not ask for are empty. ``torch.ops.libmla.<name>_out`` writes into tensors that are
given, which are annotated as mutated, as are caches and states that are written: functionalization sees it. Operators
that write those have one form only, and so have operators without an output of their own.

Operators run on torch's current stream, take outputs and workspaces from torch's allocator, and neither wait nor copy
to the host: ``mode="reduce-overhead"`` and ``torch.cuda.graph`` may capture them.
"""

from __future__ import annotations

import dataclasses
import json
import string
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _attention, _caches, _core, _indexing  # noqa: F401 (three declare the operations)
from ._call import refuse_gradients
from ._operation import OPERATIONS, Operation, Output, Part
from .types import KvCache

_Arguments = dict[str, Any]
_Tensors = dict[str, torch.Tensor]

_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_TYPES = {
    "Tensor": "Tensor",
    "bool": "bool",
    "int": "SymInt",
    "float": "float",
    "CacheFormat": "str",
    "Compute": "str",
    "DType": "ScalarType",
    "IndexerFormat": "str",
    "LengthPer": "str",
    "LseBase": "str",
    "tuple[int, int, int]": "SymInt[]",
}
_CACHE_TYPES = {field.name: str(field.type) for field in dataclasses.fields(KvCache)}
_WRITTEN_TENSORS = ("kv", "ckv", "kpe", "ckv_scale")


def _type(annotation: str, mark: str = "") -> str:
    """Returns a type of a signature in torch's words. What is written is marked, each with an alias set of its own."""
    plain = annotation.removesuffix(" | None")
    return _TYPES[plain] + mark + ("?" if plain != annotation else "")


def _cache_schema(name: str, marks: Iterator[str] | None) -> str:
    """Returns the schema of the fields of a cache, which takes marks where it is written. None has a default."""
    marks_of = dict(zip(_WRITTEN_TENSORS, marks)) if marks else {}
    return ", ".join(
        f"{_type(annotation, marks_of.get(field, ''))} {name}_{field}" for field, annotation in _CACHE_TYPES.items()
    )


def _inputs_schema(operation: Operation) -> str:
    """Returns the schema of an operation's arguments but for outputs and flags: those without a default come first."""
    required, optional = [], []
    marks = (f"({alias}!)" for alias in string.ascii_lowercase)  # outputs have the last ones
    left_out = {output.name for output in operation.outputs} | set(_flags(operation))
    for name, parameter in operation.signature.parameters.items():
        if name in operation.parts:
            caches, others = _part_schema(operation.parts[name], marks)
            required += caches
            optional += others
        elif name in operation.caches:
            required.append(_cache_schema(name, marks if name in operation.written else None))
        elif name in operation.pairs and name not in left_out:
            if parameter.default is None:
                optional.append(f"Tensor? {name}=None, Tensor? {name}_pe=None")
            else:
                required.append(f"Tensor {name}, Tensor? {name}_pe")
        elif name in ("plan", "context"):
            optional.append(f"SymInt {name}=0")
        elif name not in left_out:
            schema = f"{_type(parameter.annotation, next(marks) if name in operation.written else '')} {name}"
            if parameter.default is parameter.empty:
                required.append(schema)
            else:
                default = json.dumps(parameter.default) if type(parameter.default) is str else parameter.default
                optional.append(f"{schema}={default}")
    return ", ".join(required + optional)


def _part_schema(part: Part, marks: Iterator[str]) -> tuple[list[str], list[str]]:
    """Returns the schemas of the caches among another operation's arguments, and of the others, none of which need be
    given."""
    of, caches, others = part.operation, [], []
    for name, parameter in of.signature.parameters.items():
        full = f"{part.argument}_{name}"
        if name in of.caches:
            caches.append(_cache_schema(full, marks))
        elif name in of.pairs:
            others += [f"Tensor? {full}=None", f"Tensor? {full}_pe=None"]
        elif name in part.passed:
            plain = _type(parameter.annotation, next(marks) if name in part.written else "")
            if plain.startswith("Tensor"):
                others.append(f"{plain.removesuffix('?')}? {full}=None")
            else:
                others.append(f"{plain} {full}={parameter.default}")
    return caches, others


def _flags(operation: Operation) -> tuple[str, ...]:
    """Returns the arguments of the function that ask for outputs and are nothing else."""
    return tuple(output.flag for output in operation.outputs if output.flag.startswith("return_"))


def _torch_name(name: str) -> str:
    """Returns an argument's name in the operator. `out` is called `o`: dynamo takes arguments of that name for what
    torch's own operators have, and refuses views."""
    return "o" if name == "out" else name


class _Operator:
    """Describes how an operation looks to torch.

    Attributes:
        inputs: schema of the arguments other than outputs and flags.
        outputs: what it writes beside caches.
        caches: arguments that are a Cache. Their fields stand in the schema.
        pairs: arguments that may be a pair of tensors. The second one is `<name>_pe`.
        always_pairs: those of them that are never one tensor alone, though the second may be None.
        parts: arguments that hold those of another operation, and the names of these.
        flags: arguments that ask for outputs and are nothing else.
        writes_inputs: whether there is but one form: it writes caches or state, and outputs where they are given.
        run: the operation itself.
        make: new outputs for given inputs, by name.
    """

    def __init__(self, operation: Operation, make: Callable[[_Arguments], _Tensors]) -> None:
        self.inputs = _inputs_schema(operation)
        self.outputs = [dataclasses.replace(output, name=_torch_name(output.name)) for output in operation.outputs]
        self.caches = operation.caches
        self.pairs = tuple(_torch_name(name) for name in operation.pairs)
        self.always_pairs = tuple(
            _torch_name(name)
            for name in operation.pairs
            if operation.signature.parameters[name].annotation.startswith("tuple[")
        )
        self.outputs += [
            Output(output.name + "_pe", returned=False) for output in self.outputs if output.name in self.pairs
        ]
        self.parts = {name: part.operation.name for name, part in operation.parts.items()}
        self.flags = _flags(operation)
        self.writes_inputs = bool(operation.written)
        self.parameters = tuple(operation.signature.parameters)
        self.run = operation.run
        self.make = make


# What new outputs look like, as in the library.


def _output_dtype(a: _Arguments, given: torch.dtype) -> torch.dtype:
    if a.get("out_dtype") is not None:
        return a["out_dtype"]
    return torch.bfloat16 if given in (torch.float8_e4m3fn, torch.uint8) else given


def _value_width(a: _Arguments) -> int:
    q, q_pe, ckv = a["q"], a["q_pe"], a["cache_ckv"]
    if a.get("d_v") is not None:
        return a["d_v"]
    # Of packed rows the value is the largest power of two in the row's width, whether rotary channels are part of it.
    is_packed = a["cache_format"] not in ("bf16", "f16", "fp8")
    if q_pe is not None and not is_packed:
        return q.shape[-1]
    if ckv is not None:
        return ckv.shape[-1]
    width = q.shape[-1] + (0 if q_pe is None else q_pe.shape[-1])
    return 1 << (int(width).bit_length() - 1)


def _attention_outputs(a: _Arguments, d_v: int) -> _Tensors:
    q = a["q"]
    dtype = _output_dtype(a, q.dtype)
    if a.get("out_dtype") is None and (a.get("return_scale") or a.get("scale") is not None):
        dtype = torch.float8_e4m3fn
    return {
        "o": q.new_empty((*q.shape[:2], d_v), dtype=dtype),
        "scale": q.new_empty((*q.shape[:2], d_v // a.get("channels_per_scale", 128)), dtype=torch.float32),
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
    width = q.shape[2] + (0 if q_pe is None else q_pe.shape[2])
    return {"q_out": q.new_empty((*q.shape[:2], width), dtype=dtype)}


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


def _finished(a: _Arguments) -> _Tensors:
    o = a["attention_out"]
    quantizes = a.get("return_scale") or a.get("scale") is not None
    scales = o.shape[2] // a.get("channels_per_scale", 128)
    return {
        "o": o.new_empty(o.shape, dtype=a.get("out_dtype") or (torch.float8_e4m3fn if quantizes else o.dtype)),
        "scale": o.new_empty((*o.shape[:2], scales), dtype=torch.float32),
    }


def _pooled(a: _Arguments) -> _Tensors:
    kv = a["kv"]
    width = kv.shape[1] // 2 if a.get("overlap") else kv.shape[1]
    return {"latent": kv.new_empty((kv.shape[0], width), dtype=a.get("latent_dtype") or kv.dtype)}


def _integers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _csr(a: _Arguments) -> _Tensors:
    table = a["block_table"]
    requests, pages = table.shape
    return {"kv_indptr": _integers(table, requests + 1), "kv_indices": _integers(table, requests * pages)}


def _slots(a: _Arguments) -> _Tensors:
    indices = a["indices"]
    tokens, width = indices.shape
    if a.get("list_tokens"):
        width = width * a.get("ratio", 1) + a.get("ratio", 1) - 1
    return {"slots": _integers(indices, tokens, width), "valid_count": _integers(indices, indices.shape[0])}


def _logits(a: _Arguments) -> torch.Tensor:
    width = a.get("max_kv_len")
    if width is None and a.get("blocks") is not None:
        width = a["blocks"].shape[1] * a.get("block_size", 1)
    elif width is None:
        pages = a["block_table"] if a.get("block_table") is not None else a["kv_indices"]
        width = pages.shape[-1] * a["page_size"]
    return a["q"].new_empty((a["q"].shape[0], width), dtype=a.get("logits_dtype") or torch.float32)


def _selected(a: _Arguments) -> _Tensors:
    q, width = a["q"], a["k"]
    if a.get("list_tokens"):
        width = width * a.get("ratio", 1) + a.get("ratio", 1) - 1
    return {
        "logits": _logits(a),
        "slots": _integers(q, q.shape[0], width),
        "valid_count": _integers(q, q.shape[0]),
    }


_NEW_OUTPUTS: dict[str, Callable[[_Arguments], _Tensors]] = {
    "decode": lambda a: _attention_outputs(a, _value_width(a)),
    "decode_sparse": lambda a: _attention_outputs(a, _value_width(a)),
    "prefill": lambda a: _attention_outputs(a, a["v"].shape[-1]),
    "prefill_sparse": lambda a: _attention_outputs(a, a.get("d_v", 512)),
    "merge_states": _merged,
    "append_rope": _rotated,
    "gather": _gathered,
    "compress": _pooled,
    "finish_output": _finished,
    "block_table_to_csr": _csr,
    "physical_slots": _slots,
    "indexer_logits": lambda a: {"logits": _logits(a)},
    "top_k": lambda a: {"indices": _integers(a["logits"], a["logits"].shape[0], a["k"])},
    "indexer_top_k": _selected,
}
_OPERATORS = {
    name: _Operator(operation, _NEW_OUTPUTS.get(name, lambda _: {})) for name, operation in OPERATIONS.items()
}
# Of the empty tensor that stands for an output which nobody asked for; others: f32.
_EMPTY_DTYPES = {"valid_count": torch.int32}


def _number(thing: Any) -> int:
    """Returns what stands in a graph for a Plan or a Context: its number, or 0 for None."""
    if thing is None:
        return 0
    if torch.compiler.is_exporting():
        raise ValueError("plan and context live in this process: an exported program cannot hold them")
    return thing._number


def _numbered(number: int) -> Any:
    if number == 0:
        return None
    found = _core.numbered(number)
    if found is None:
        raise RuntimeError("the Plan or Context that the compiled function was made with is gone")
    return found


def _dtype(dtype: Any) -> torch.dtype | None:
    return (_DTYPES.get(dtype) or getattr(torch, dtype)) if isinstance(dtype, str) else dtype


def _flatten_cache(name: str, cache: Any) -> _Arguments:
    if type(cache) is not KvCache:  # an empty format: that of the elements
        ckv, kpe = cache if type(cache) is tuple else (None, None)
        cache = KvCache("", kv=None if type(cache) is tuple else cache, ckv=ckv, kpe=kpe)
    return {f"{name}_{field}": getattr(cache, field) for field in _CACHE_TYPES}


def _flatten(operator: _Operator, arguments: _Arguments) -> _Arguments:
    """Returns the function's arguments as the operator's."""
    flat = {}
    for given, value in arguments.items():
        name = _torch_name(given)
        if name in operator.parts:
            continue
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
    for name, other in operator.parts.items():
        part = _flatten(_OPERATORS[other], arguments.get(name) or {})
        flat.update({f"{name}_{field}": value for field, value in part.items()})
    return flat


def _unflatten(operator: _Operator, flat: _Arguments) -> _Arguments:
    """Returns the operator's arguments as the function's."""
    arguments = dict(flat)
    for name, other in operator.parts.items():
        fields = [field for field in arguments if field.startswith(f"{name}_")]
        part = {field.removeprefix(f"{name}_"): arguments.pop(field) for field in fields}
        if any(isinstance(value, torch.Tensor) for value in part.values()):
            arguments[name] = _unflatten(_OPERATORS[other], part)
    for name in operator.caches:
        fields = {field: arguments.pop(f"{name}_{field}") for field in _CACHE_TYPES}
        if fields["format"]:
            arguments[name] = KvCache(**fields)
        elif fields["ckv"] is not None:
            arguments[name] = (fields["ckv"], fields["kpe"])
        elif fields["kv"] is not None:
            arguments[name] = fields["kv"]
    for name in operator.pairs:
        second = arguments.pop(name + "_pe", None)
        if second is not None or (name in operator.always_pairs and arguments[name] is not None):
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
    """Returns the names of the outputs that a call makes or writes."""

    def asked_for(output: Output) -> bool:
        flag = flat.get(output.flag) if output.flag else True
        return output.returned and flag is not None and flag is not False

    names: list[str] = []
    for output in operator.outputs:
        if flat.get(output.name) is not None or asked_for(output) or output.implied_by in names:
            names.append(output.name)
    return names


def _traced(name: str, operator: _Operator) -> Callable[..., Any]:
    """Returns the function of that name for tensors that are being traced."""
    outputs, flags, writes_inputs = operator.outputs, operator.flags, operator.writes_inputs

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(operator.parameters, args)), **kwargs}
        flat = _flatten(operator, arguments)
        if torch.is_grad_enabled():
            refuse_gradients(name, tuple(flat.values()))
        wanted = _wanted(operator, flat)
        given = {output.name: flat.pop(output.name, None) for output in outputs}
        asked = {flag: flat.pop(flag) for flag in flags if flag in flat}
        returned = [output.name for output in outputs if output.returned]
        if not writes_inputs and all(value is None for value in given.values()):
            made = getattr(torch.ops.libmla, name)(**flat, **asked)
            results = dict(zip(returned, made if len(returned) > 1 else (made,)))
        else:
            fresh = operator.make({**flat, **given, **asked}) if any(given[output] is None for output in wanted) else {}
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
    """Returns a function by which a kernel names its arguments. torch leaves away those that have their default
    value."""
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def bind(args: tuple[Any, ...], kwargs: _Arguments) -> _Arguments:
        return {**defaults, **dict(zip(defaults, args)), **kwargs}

    return bind


def _register_making(library: torch.library.Library, name: str, operator: _Operator) -> None:
    """Registers the form of an operator that makes its outputs."""
    returned = [output for output in operator.outputs if output.returned]
    flags = "".join(f", bool {flag}=False" for flag in operator.flags)
    library.define(f"{name}({operator.inputs}{flags}) -> ({', '.join(['Tensor'] * len(returned))})", tags=_TAGS)
    bind = _bound(getattr(torch.ops.libmla, name).default._schema)

    def collect(flat: _Arguments, results: Callable[[str], torch.Tensor]) -> Any:
        wanted = _wanted(operator, flat)
        device = next(value for value in flat.values() if isinstance(value, torch.Tensor)).device
        collected = tuple(
            results(output.name)
            if output.name in wanted
            else torch.empty(0, dtype=_EMPTY_DTYPES.get(output.name, torch.float32), device=device)
            for output in returned
        )
        return collected if len(collected) > 1 else collected[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        flat = bind(args, kwargs)
        result = operator.run((), _unflatten(operator, flat))
        made = iter(result if type(result) is tuple else (result,))
        return collect(flat, lambda _: next(made))

    def fake(*args: Any, **kwargs: Any) -> Any:
        flat = bind(args, kwargs)
        made = operator.make(flat)
        return collect(flat, lambda output: made[output])

    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"libmla::{name}", fake, lib=library)


def _register_writing(library: torch.library.Library, name: str, operator: _Operator) -> None:
    """Registers the form of an operator that writes into given tensors."""
    form = name if operator.writes_inputs else name + "_out"
    outputs = "".join(f", Tensor({alias}!)? {output.name}=None" for alias, output in zip("wxyz", operator.outputs))
    library.define(f"{form}({operator.inputs}{outputs}) -> ()", tags=_TAGS)
    bind = _bound(getattr(torch.ops.libmla, form).default._schema)

    def run(*args: Any, **kwargs: Any) -> None:
        operator.run((), _unflatten(operator, bind(args, kwargs)))

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

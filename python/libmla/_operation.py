# SPDX-License-Identifier: Apache-2.0
"""Holds what the operations of :mod:`libmla.ops` have in common: how a call's arguments reach the library, and how its
results come back.

An operation is declared, not written: a function with a signature and a documentation, and no body. Its arguments have
the names that the library has for them, which says in which order they are passed (``libmla.arguments``, in C++).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any, NoReturn, ParamSpec, TypeVar

from tvm_ffi import get_global_func

from . import _core, frameworks
from ._call import calling_names, compiling, gradients, refuse_gradients, refuse_without_memory
from .types import Cache, KvCache, Rows

P = ParamSpec("P")
R = TypeVar("R")

OPERATIONS: dict[str, Operation] = {}
"""Holds all operations, by name."""


@dataclass(frozen=True)
class Output:
    """Describes a tensor that an operation writes; `name` is the argument in which the caller may give it.

    Attributes:
        flag: the argument by which a caller asks for it; empty: it is always made.
        implied_by: an output that brings this one with it; empty: none.
        returned: whether the function returns it; if not, it is scratch.
    """

    name: str
    flag: str = ""
    implied_by: str = ""
    returned: bool = True


def parts(pair: Any, name: str) -> tuple[Any, Any]:
    if len(pair) != 2:
        raise TypeError(f"{name}: expected a pair of tensors, the latent and the rotary part, got {len(pair)}")
    return pair[0], pair[1]


def _whole_and_parts(rows: Rows, name: str) -> tuple[Any, Any, Any]:
    return (None, *parts(rows, name)) if type(rows) is tuple else (rows, None, None)


def _optional_parts(pair: Any, name: str) -> tuple[Any, Any]:
    return (None, None) if pair is None else parts(pair, name)


_CACHE_FIELDS = tuple(field.name for field in fields(KvCache))
_CACHE_TENSORS = tuple(field.name for field in fields(KvCache) if "Tensor" in str(field.type))
_fields_of = attrgetter(*_CACHE_FIELDS)
_NO_CACHE = (None,) * len(_CACHE_FIELDS)
_KV, _CKV, _KPE = (_CACHE_FIELDS.index(name) for name in ("kv", "ckv", "kpe"))
# Of a cache that is no KvCache. The library finds its format.
_BARE = ["" if field.default is MISSING else field.default for field in fields(KvCache)]


def _cache_fields(cache: Cache, name: str) -> Sequence[Any]:
    if type(cache) is KvCache:
        return _fields_of(cache)
    bare = _BARE.copy()
    if type(cache) is tuple:
        bare[_CKV], bare[_KPE] = parts(cache, name)
    else:
        bare[_KV] = cache
    return bare


def _optional_cache_fields(cache: Cache | None, name: str) -> Sequence[Any]:
    return _NO_CACHE if cache is None else _cache_fields(cache, name)


# What the text of a layout may name.
_WORDS = {
    "calling_names": calling_names,
    "whole_and_parts": _whole_and_parts,
    "optional_parts": _optional_parts,
    "cache_fields": _cache_fields,
    "optional_cache_fields": _optional_cache_fields,
}


class Part:
    """Turns an argument that holds those of another operation, by name, into what the library is passed of them.

    Attributes:
        call: name of the operation that has the argument.
        argument: its name.
        operation: the other operation.
        passed: names of what is passed, as of the other operation.
        written: its arguments that are changed in place, outputs among them.
    """

    def __init__(self, call: str, argument: str, operation: Operation, passed: list[str]) -> None:
        self.call = call
        self.argument = argument
        self.operation = operation
        self.passed = passed
        self.written = (*operation.written, *(output.name for output in operation.outputs))
        self._known = {re.match(r"\w+", name).group() for name in passed}
        required = (name for name, p in operation.signature.parameters.items() if p.default is p.empty)
        self._absent = self._fields(dict.fromkeys(required))

    def _fields(self, arguments: dict[str, Any]) -> tuple[Any, ...]:
        return self.operation.lay_out(**arguments)[1][3 : 3 + len(self.passed)]  # behind names, context and plan

    def __call__(self, arguments: dict[str, Any] | None) -> tuple[Any, ...]:
        if arguments is None:
            return self._absent
        if type(arguments) is not dict:
            self._refuse(f"expected a dict of {self.operation.name}'s arguments, got {type(arguments).__name__}")
        if unknown := arguments.keys() - self._known:
            self._refuse(f"expected {', '.join(sorted(self._known))}, got {', '.join(unknown)}")
        try:
            return self._fields(arguments)
        except TypeError as error:
            self._refuse(str(error))

    def _refuse(self, text: str) -> NoReturn:
        raise TypeError(f"{self.call}: {self.argument}: {text}") from None


class Operation:
    """Turns the arguments of one operation into those of the library's function, and what that function made into the
    results.

    Attributes:
        signature: that of the Python function.
        outputs: what it writes beside caches.
        written: arguments that it changes in place: caches, and what is kept from call to call.
        caches: arguments that are a Cache, which the library gets field by field.
        pairs: arguments that may be a pair of tensors, which the library gets one by one.
        parts: arguments that hold those of another operation.
        passed: names of what the library gets, in order.
        lay_out: makes of a call's arguments the outputs to be returned (None for those that the caller did not give)
            and what the library's function is called with: names, context, plan, and what `passed` names.
    """

    def __init__(
        self, function: Callable[..., Any], outputs: tuple[Output, ...], written: tuple[str, ...], parts: dict[str, str]
    ) -> None:
        self.name = function.__name__
        self.signature = inspect.signature(function)
        self.outputs = outputs
        self.written = written
        self.passed = [str(name) for name in _core.function("arguments")(self.name)]
        self.parts = {argument: self._part(argument, OPERATIONS[other]) for argument, other in parts.items()}
        own = [name for name in self.passed if name.partition(".")[0] not in parts]
        self.caches = tuple(name.removesuffix(".format") for name in own if name.endswith(".format"))
        self.pairs = tuple(name.removesuffix("[0]") for name in own if name.endswith("[0]"))
        self.positional = tuple(
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.kind is not parameter.KEYWORD_ONLY
        )
        self._library = _core.function(self.name)
        self.lay_out = self._layout(function, own)
        # Behind names, context and plan.
        self._tensors = itemgetter(*(place for place, name in enumerate(self.passed, 3) if self._is_tensor(name)))

    def _part(self, argument: str, operation: Operation) -> Part:
        names = [name.removeprefix(f"{argument}.") for name in self.passed if name.startswith(f"{argument}.")]
        if names != operation.passed[: len(names)]:
            self._refuse_version([argument])
        return Part(self.name, argument, operation, names)

    def _refuse_version(self, differing: list[str]) -> None:
        raise RuntimeError(
            f"{self.name}: libmla's Python and its library are of different versions: {', '.join(differing)}"
        )

    def _layout(self, function: Callable[..., Any], own: list[str]) -> Callable[..., Any]:
        """Makes `lay_out`, of the operation's signature. `own` are names of what is passed, parts aside.

        It is made of text, as collections.namedtuple makes its own, so that a call costs no more than building a tuple.
        """
        parameters = self.signature.parameters
        handles = {name: f"getattr({name}, '_handle', {name})" for name in ("context", "plan") if name in parameters}
        values = {"names": "calling_names()", "context": "None", "plan": "None", **handles}
        for name in self.passed:
            argument = re.match(r"\w+", name).group()
            if argument in self.parts:
                values[argument] = f"*parts['{argument}']({argument})"
            elif argument in self.caches:
                fields_of = "optional_cache_fields" if parameters[argument].default is None else "cache_fields"
                values[argument] = f"*{fields_of}({argument}, '{argument}')"
            elif argument in self.pairs:
                halves = "whole_and_parts" if argument in own else "optional_parts"
                values[argument] = f"*{halves}({argument}, '{argument}')"
            else:
                values[argument] = argument
        self._check_names(own, set(values) - {"names", "context", "plan"} | set(handles))
        listed = ", ".join(self.positional + ("*",) + tuple(name for name in parameters if name not in self.positional))
        results = "".join(self._result(output) for output in self.outputs if output.returned)
        lay_out = eval(
            f"lambda {listed}: (({results}), ({', '.join(values.values())}))", {**_WORDS, "parts": self.parts}
        )
        lay_out.__name__ = lay_out.__qualname__ = self.name  # for what Python says of arguments that do not fit
        lay_out.__defaults__, lay_out.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return lay_out

    def _is_tensor(self, passed: str) -> bool:
        """Returns whether what is passed under a name may be a tensor: of a cache, some fields are."""
        argument, _, field = passed.partition(".")
        if argument in self.parts:
            return self.parts[argument].operation._is_tensor(field)
        if field:
            return field in _CACHE_TENSORS
        annotation = self.signature.parameters[re.match(r"\w+", argument).group()].annotation
        return annotation is inspect.Parameter.empty or "Tensor" in str(annotation) or "Rows" in str(annotation)

    def _result(self, output: Output) -> str:
        """Returns the text that stands for an output in a list of results; it adds nothing to the list if nobody asked
        for the output."""
        if not output.flag.startswith("return_"):
            return f"{output.name}, "
        asked = [each for each in self.outputs if each.name in (output.name, output.implied_by)]
        wanted = " or ".join(f"{each.flag} or {each.name} is not None" for each in asked)
        return f"*(({output.name},) if {wanted} else ()), "

    def _check_names(self, own: list[str], arguments: set[str]) -> None:
        """Raises RuntimeError unless the library knows the arguments of the signature and no others, and has the fields
        of each cache in the order of KvCache."""
        of_caches = [name.rpartition(".")[2] for name in own if "." in name]
        if arguments != set(self.signature.parameters) or of_caches != [*_CACHE_FIELDS] * len(self.caches):
            self._refuse_version(sorted(arguments.symmetric_difference(self.signature.parameters)))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the library with tensors that it can take as they are."""
        results, arguments = self.lay_out(*args, **kwargs)
        if gradients():
            refuse_gradients(self.name, self._tensors(arguments))
        try:
            made = self._library(*arguments)
        except RuntimeError:
            refuse_without_memory(self.name, arguments)
            raise
        if len(results) == 1:
            return results[0] if made is None else made
        if made is None:
            return results or None
        filled = list(results)
        missing = [place for place, given in enumerate(results) if given is None]
        for number, place in enumerate(missing):
            filled[place] = made if len(missing) == 1 else _item(made, number)
        return tuple(filled)


# Takes a tensor out of what the library made. An array's own iterator asks three times as much of the library.
_item = get_global_func("ffi.ArrayGetItem")

_traced: Callable[[str], Callable[..., Any]] | None = None


def trace_with(operators: Callable[[str], Callable[..., Any]]) -> None:
    """Sets the function that finds, by an operation's name, the function that stands for it while torch traces."""
    global _traced
    _traced = operators


def operation(
    *outputs: Output, written: tuple[str, ...] = (), parts: dict[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes an operation of its declaration; `parts` names the arguments that hold those of another operation.

    Tensors of torch and of tvm-ffi go straight to the library. Arrays of other frameworks (numpy, JAX, CuPy, and
    whatever else speaks DLPack) are lent to it, see :mod:`libmla.frameworks`. Under torch.compile and torch.export the
    call goes to the registered operators of :mod:`libmla.torch_ops`.
    """

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        declared = OPERATIONS[function.__name__] = Operation(function, outputs, written, parts or {})
        name, positional, run = declared.name, declared.positional, declared.run
        framework_of_type, direct = frameworks.framework_of_type, frameworks.DIRECT

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            if compiling():
                return _traced(name)(*args, **kwargs)
            first = args[0] if args else None
            if type(first) is tuple and first:
                first = first[0]
            framework = framework_of_type.get(type(first))
            if framework not in direct:
                leader = frameworks.leader_of(args, kwargs)
                framework = frameworks.framework_of(leader)
                if framework == frameworks.TRACED:
                    return _traced(name)(*args, **kwargs)
                fits = len(args) <= len(positional) and kwargs.keys().isdisjoint(positional[: len(args)])
                # What does not fit its signature, Python says itself.
                if fits and framework and framework not in direct:
                    return frameworks.run_borrowed(declared, {**dict(zip(positional, args)), **kwargs}, leader)
            return run(args, kwargs)

        return call

    return declare

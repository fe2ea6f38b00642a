"""Reads the pickles of CIFAR as data, without importing or calling anything that they name.

Python's unpickler executes code from the file. Even if only NumPy's `_reconstruct` and `dtype` are allowed, a crafted
file can make NumPy dereference arbitrary addresses. `pickletools` splits a file into opcodes without executing them.
This module interprets the opcodes of dictionaries, text, numbers, lists and integer arrays, and rejects all others.
"""

import pickletools
import re
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")
_MAX_OPCODES = 25  # per image; files have 3 to 11, depending on the writer
_INTEGERS = {"INT", "BININT", "BININT1", "BININT2"}  # INT: booleans of protocol 1
_TEXTS = {"BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ARRAY, _DTYPE, _BUFFER, _ENCODE = "numpy array", "numpy dtype", "numpy buffer", "bytes as text"
_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _ARRAY,
    ("numpy.core.numeric", "_frombuffer"): _BUFFER,  # protocol 5
    ("numpy._core.numeric", "_frombuffer"): _BUFFER,
    ("numpy", "ndarray"): "numpy class",  # an argument of _reconstruct, never called
    ("numpy", "dtype"): _DTYPE,
    ("_codecs", "encode"): _ENCODE,  # how Python 3 writes bytes for Python 2
}


@dataclass(frozen=True)
class _Name:
    """A placeholder for a function or class that a file names."""

    meaning: str


@dataclass
class _Dtype:
    code: Any
    order: Any = "|"


@dataclass
class _Array:
    value: np.ndarray | None = None


def read_dictionary(content: bytes, samples: int = 10_000) -> dict[str, Any]:
    """Return the dictionary in a pickle, with byte strings as Latin-1 text. Raises ValueError for any other content."""
    interpreter, limit = _Interpreter(), _MAX_OPCODES * samples
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if number >= limit:
                raise ValueError(f"a pickle with more than {limit:,} opcodes")
            interpreter.step(opcode.name, argument)
        found = interpreter.stack.pop()
    except (IndexError, KeyError, OverflowError):
        raise ValueError("a corrupt pickle") from None
    if not isinstance(found, dict):
        raise ValueError("a pickle that does not hold a dictionary")
    return {key: value.value if isinstance(value, _Array) else value for key, value in found.items()}


class _Interpreter:
    """The stack and memo of the opcodes, which only ever contain plain values and the classes above."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _INTEGERS or name in _TEXTS:
            stack.append(argument)
        elif name in _BYTES:
            stack.append(argument.decode("latin-1"))
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self._marks.append(len(stack) - _TUPLES[name])
            stack.append(tuple(self._since_mark()))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("APPEND", "APPENDS"):
            items = self._since_mark() if name == "APPENDS" else [stack.pop()]
            _typed(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._since_mark() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
            for key, value in zip(items[::2], items[1::2], strict=True):
                _typed(stack[-1], dict)[_typed(key, str)] = value  # hashing nested keys could overflow the stack
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            path = argument.split(" ", 1) if name == "GLOBAL" else [stack.pop() for _ in range(2)][::-1]
            stack.append(_named(*path))
        elif name == "REDUCE":
            arguments = _typed(stack.pop(), tuple)
            stack.append(_made(_typed(stack.pop(), _Name), arguments))
        elif name == "BUILD":
            state = _typed(stack.pop(), tuple)
            _fill(stack[-1], state)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"a pickle with the opcode {name}, which CIFAR does not use")

    def _since_mark(self) -> list[Any]:
        begin = self._marks.pop()
        if not 0 <= begin <= len(self.stack):
            raise IndexError
        items = self.stack[begin:]
        del self.stack[begin:]
        return items


def _typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise ValueError(f"a pickle with a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _named(module: Any, name: Any) -> _Name:
    if (meaning := _NAMES.get((_typed(module, str), _typed(name, str)))) is None:
        raise ValueError(f"a pickle that names {f'{module}.{name}'!r}, which is not an array")
    return _Name(meaning)


def _made(name: _Name, arguments: tuple[Any, ...]) -> Any:
    """Return what calling a name would return, without calling it."""
    if name.meaning == _ARRAY:
        return _Array()
    if name.meaning == _BUFFER:
        raw, dtype, shape, order = arguments
        return _Array(_array(raw, dtype, shape, order == "F"))
    if name.meaning == _DTYPE:
        return _Dtype(arguments[0])
    if name.meaning == _ENCODE:
        return _typed(arguments[0], str)
    raise ValueError(f"a pickle that constructs a {name.meaning}")


def _fill(target: Any, state: tuple[Any, ...]) -> None:
    """Set the state of an array or dtype, as __setstate__ would."""
    if isinstance(target, _Array):
        _, shape, dtype, fortran, raw = state
        target.value = _array(raw, dtype, shape, fortran)
    else:
        _typed(target, _Dtype).order = state[1]


def _array(raw: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray:
    kind = _typed(_typed(dtype, _Dtype).order, str) + _typed(dtype.code, str)
    if not re.fullmatch(r"[<>|=][iu][1248]", kind):  # an object array would contain addresses
        raise ValueError(f"an array of {kind[:20]!r} instead of integers")
    if any(_typed(side, int) < 0 for side in _typed(shape, tuple)):
        raise ValueError("an array with a negative shape")
    return np.frombuffer(_typed(raw, str).encode("latin-1"), kind).reshape(shape, order="F" if fortran else "C")

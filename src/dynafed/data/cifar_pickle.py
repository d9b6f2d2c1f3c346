"""Reads the batches of CIFAR's Python version, which are pickles, without unpickling them.

The few opcodes of the official files (protocol 2, written by Python 2) are followed symbolically: nothing is imported
or called. A file with any other opcode, or with values where the official files have none, is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Uint8 = NDArray[np.uint8]

_NUMBERS = {  # the opcodes with a number: their names in Python's module pickle, and the number's type
    b"\x80": ("PROTO", "B"),
    b"J": ("BININT", "<i"),
    b"K": ("BININT1", "B"),
    b"M": ("BININT2", "<H"),
    b"T": ("BINSTRING", "<I"),
    b"U": ("SHORT_BINSTRING", "B"),
    b"q": ("BINPUT", "B"),
    b"r": ("LONG_BINPUT", "<I"),
    b"h": ("BINGET", "B"),
    b"j": ("LONG_BINGET", "<I"),
}
_OTHERS = {
    b"N": "NONE",
    b"\x88": "NEWTRUE",
    b"\x89": "NEWFALSE",
    b"c": "GLOBAL",
    b"(": "MARK",
    b"]": "EMPTY_LIST",
    b"}": "EMPTY_DICT",
    b"\x85": "TUPLE1",
    b"\x86": "TUPLE2",
    b"\x87": "TUPLE3",
    b"t": "TUPLE",
    b"a": "APPEND",
    b"e": "APPENDS",
    b"s": "SETITEM",
    b"u": "SETITEMS",
    b"R": "REDUCE",
    b"b": "BUILD",
    b".": "STOP",
}

_RECONSTRUCT, _NDARRAY, _DTYPE = b"numpy.core.multiarray\n_reconstruct", b"numpy\nndarray", b"numpy\ndtype"
_ARRAY, _UINT8 = b"array", b"uint8"
_UINT8_ARGS = (b"u1", 0, 1)
_UINT8_STATE = (3, b"|", None, None, None, -1, -1, 0)


class _Symbol:
    """Stands for a function, the dtype uint8, or an array, whose `values` are known once it is built."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.values: Uint8 | None = None


def read_batch(data: bytes, label_key: str) -> tuple[Uint8, NDArray[Any]]:
    """The pixels (samples, 3072) and labels of a batch; raises some `Exception` if it isn't like the official ones."""
    batch = _parse(data)
    pixels, labels = batch.get(b"data"), batch.get(label_key.encode())
    if not isinstance(pixels, _Symbol) or pixels.values is None or not isinstance(labels, list):
        raise ValueError(f"it lacks the array 'data' or the list '{label_key}'")
    return pixels.values, np.array(labels)


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """The names of a pickle's opcodes and their arguments."""
    place = 0
    while place < len(data):
        code = data[place : place + 1]
        place += 1
        argument: Any = None
        if code in _NUMBERS:
            name, kind = _NUMBERS[code]
            (argument,) = struct.unpack_from(kind, data, place)
            place += struct.calcsize(kind)
        elif code in _OTHERS:
            name = _OTHERS[code]
        else:
            raise ValueError(f"it has the opcode {code!r}, which no CIFAR file has")
        if name in ("BINSTRING", "SHORT_BINSTRING", "GLOBAL"):
            end = place + argument if argument is not None else data.index(b"\n", data.index(b"\n", place) + 1)
            if end > len(data):
                raise ValueError("it ends too early")
            argument, place = data[place:end], end + (name == "GLOBAL")
        yield name, argument


def _parse(data: bytes) -> dict[bytes, Any]:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_marked() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    # The official files have less than 6 opcodes per image of 3072 bytes.
    most = 1000 + len(data) // 256
    for number, (name, value) in enumerate(_opcodes(data)):
        if number > most:
            raise ValueError(f"it has more than {most} opcodes")
        match name:
            case "PROTO":
                if value != 2:
                    raise ValueError(f"it is a pickle of protocol {value}, not 2")
            case "BININT" | "BININT1" | "BININT2" | "BINSTRING" | "SHORT_BINSTRING":
                stack.append(value)
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "GLOBAL":
                if value not in (_RECONSTRUCT, _NDARRAY, _DTYPE):
                    raise ValueError(f"it asks to run {value[:100]!r}, which no CIFAR file does")
                stack.append(_Symbol(value))
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(name[-1])
                stack[-length:] = [_tuple(stack[-length:])]
            case "TUPLE":
                stack.append(_tuple(pop_marked()))
            case "APPEND":
                _extend(stack, [stack.pop()])
            case "APPENDS":
                _extend(stack, pop_marked())
            case "SETITEM":
                _update(stack, [stack.pop(-2), stack.pop()])
            case "SETITEMS":
                _update(stack, pop_marked())
            case "REDUCE":
                arguments = stack.pop()
                stack.append(_reduce(stack.pop(), arguments))
            case "BUILD":
                state = stack.pop()
                _build(stack[-1], state)
            case "STOP":
                if len(stack) == 1 and isinstance(stack[0], dict):
                    return stack[0]
                break
    raise ValueError("it isn't one dict")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | bytes)


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    """A tuple at most two deep and as long as the longest, a dtype's state."""
    if len(items) > len(_UINT8_STATE):
        raise ValueError(f"it has a tuple of {len(items)} items")
    for item in items:
        if not (
            _is_plain(item) or isinstance(item, _Symbol) or (isinstance(item, tuple) and all(map(_is_plain, item)))
        ):
            raise ValueError("it has a tuple that no CIFAR file has")
    return tuple(items)


def _extend(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], list) or not all(map(_is_plain, items)):
        raise ValueError("it has a list of other than numbers and texts")
    stack[-1].extend(items)


def _update(stack: list[Any], items: list[Any]) -> None:
    keys, values = items[::2], items[1::2]
    if not isinstance(stack[-1], dict) or not all(isinstance(key, bytes) for key in keys):
        raise ValueError("it has a dict with other keys than texts")
    if not all(_is_plain(value) or isinstance(value, list | _Symbol) for value in values):
        raise ValueError("it has a dict in a dict")
    stack[-1].update(zip(keys, values, strict=True))


def _reduce(function: Any, arguments: Any) -> _Symbol:
    name = function.name if isinstance(function, _Symbol) else None
    if name == _RECONSTRUCT and isinstance(arguments, tuple) and len(arguments) == 3:
        kind, *rest = arguments
        if isinstance(kind, _Symbol) and kind.name == _NDARRAY and rest == [(0,), b"b"]:
            return _Symbol(_ARRAY)
    if name == _DTYPE and arguments == _UINT8_ARGS:
        return _Symbol(_UINT8)
    raise ValueError("it has an array that is not of uint8")


def _build(target: Any, state: Any) -> None:
    name = target.name if isinstance(target, _Symbol) else None
    if name == _UINT8 and state == _UINT8_STATE:
        return
    if name != _ARRAY or not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("it builds something else than an array")
    version, shape, dtype, fortran, raw = state
    if version != 1 or not (isinstance(dtype, _Symbol) and dtype.name == _UINT8) or not isinstance(raw, bytes):
        raise ValueError("it has an array that is not of uint8")
    if not isinstance(shape, tuple) or len(shape) != 2:
        raise ValueError("it has an array that is not of two dimensions")
    target.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")

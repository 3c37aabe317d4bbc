"""Control and stream messages: maps in MessagePack, and nothing that could name a type.

Pure; any thread. What is unpacked comes from a member of the cluster, which may still be broken or hostile: size,
depth and the number of containers are bounded, so a small frame cannot become a large heap. Error texts never
quote a message, which may hold a prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgpack

from mlxcel_nb.errors import WireError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MAX_BYTES = 4 << 20
"""Room for a prompt of half a million token ids."""
MAX_DEPTH = 16
MAX_CONTAINERS = 4096
"""Maps and arrays in one message, at all depths: an empty map takes 64 times its encoding in memory."""

_SCALARS = frozenset({str, bytes, int, float, bool, type(None)})
_LISTS = (list, tuple)


def pack(message: dict[str, Any]) -> bytes:
    """`message` as MessagePack.

    Raises:
        WireError: when the other side's `unpack` would refuse it.
    """
    if type(message) is not dict:
        raise WireError(f"a message is a map, not {type(message).__name__}")
    _check(message)
    try:
        data = bytes(msgpack.packb(message, use_bin_type=True))
    except (OverflowError, ValueError, UnicodeEncodeError) as error:
        raise WireError(f"a message cannot be packed: {type(error).__name__}") from None
    if len(data) > MAX_BYTES:
        raise WireError(f"a message of {len(data)} bytes; at most {MAX_BYTES} are allowed")
    return data


def unpack(data: ReadableBuffer) -> dict[str, Any]:
    """The one map in `data`.

    Raises:
        WireError: anything but one whole map with text keys, of plain values, within the bounds.
    """
    view = memoryview(data)
    if len(view) > MAX_BYTES:
        raise WireError(f"a message of {len(view)} bytes; at most {MAX_BYTES} are allowed")
    budget = _Budget()
    try:
        message = msgpack.unpackb(
            view,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=budget.to_dict,
            list_hook=budget.count,
            ext_hook=_no_extension,
            max_ext_len=0,  # timestamps never reach the hook
        )
    except WireError:
        raise
    except Exception as error:  # noqa: BLE001 - msgpack raises many types, some of which quote the data
        raise WireError(f"a message that is not MessagePack ({type(error).__name__})") from None
    if type(message) is not dict:
        raise WireError(f"a message is a map, not {type(message).__name__}")
    if budget.containers > MAX_DEPTH:  # fewer cannot be nested any deeper
        _check(message)
    return message


class _Budget:
    """Counts containers while they are being built."""

    def __init__(self) -> None:
        self.containers = 0

    def count(self, value: Any) -> Any:
        self.containers += 1
        if self.containers > MAX_CONTAINERS:
            raise WireError(f"a message with more than {MAX_CONTAINERS} maps and lists")
        return value

    def to_dict(self, pairs: list[tuple[Any, Any]]) -> Any:
        self.count(None)
        result = dict(pairs)
        if len(result) != len(pairs):
            raise WireError("a message names a key twice")
        _check_keys(result)
        return result


def _no_extension(code: int, _data: bytes) -> NoReturn:
    raise WireError(f"a message with extension type {code}")


def _check_keys(value: dict[Any, Any]) -> None:
    if not all(type(key) is str for key in value):
        raise WireError("a message has a key that is not text")


def _check(message: dict[str, Any]) -> None:
    """Refuse unpackable types, and too many or too deep containers. Long flat lists are checked at C speed."""
    containers = 0
    stack: list[tuple[Any, int]] = [(message, 1)]
    while stack:
        value, depth = stack.pop()
        containers += 1
        if depth > MAX_DEPTH:
            raise WireError(f"a message nested deeper than {MAX_DEPTH}")
        if containers > MAX_CONTAINERS:
            raise WireError(f"a message with more than {MAX_CONTAINERS} maps and lists")
        if type(value) is dict:
            _check_keys(value)
            items: Any = value.values()
        else:
            items = value
        if _SCALARS.issuperset(map(type, items)):
            continue
        for item in items:
            kind = type(item)
            if kind is dict or kind in _LISTS:
                stack.append((item, depth + 1))
            elif kind not in _SCALARS:
                raise WireError(f"a message cannot carry {kind.__name__}")

"""MessagePack of a member's choice, and what reads it: the first message, errors."""

from __future__ import annotations

import contextlib

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.net.links.link import read_first_message
from mlxcel_nb.wire import messages
from tests.fuzz.script import check_words


def packed(data: bytes) -> None:
    """MessagePack of a member's choice, and what reads it: the first message, errors."""
    try:
        got = messages.unpack(data)
    except WireError as error:
        check_words(error, 300)
        return
    assert len(data) <= messages.MAX_BYTES
    again = messages.pack(got)
    assert messages.pack(messages.unpack(again)) == again
    with contextlib.suppress(MlxcelError):
        first = read_first_message(got)
        assert len(first["features"]) <= 64 and len(first["versions"]) <= 64
    assert all(line.isprintable() for line in str(errors.from_dict(got)).splitlines())

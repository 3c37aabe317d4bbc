"""One connection to a caller: uvicorn's, which in addition does not wait for ever. On the server's loop.

A request's head arrives within `HEAD_S`, or the connection ends: a caller who says nothing costs a file descriptor. One
who takes nothing can be cut off (`abort`), for a polite close would wait until he has taken everything. What is no HTTP
is refused in the shape that all errors have here.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxcel_nb.serve.failures import ApiError

HEAD_S = 10.0

HEAD_BYTES = 64 << 10
"""Of a request's head. A ticket and a key are short."""


class Connection(H11Protocol):
    """An HTTP/1.1 connection. The state of its requests has `abort`, and `caller`, where it is kept from one request to
    the next what has been found out about whoever is at the other end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "abort": self._abort, "caller": {}}
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._head = self.loop.call_later(HEAD_S, self._abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(HEAD_S, self._abort)  # the next request has begun

    def send_400_response(self, _msg: str) -> None:
        """Uvicorn's answer to what h11 cannot read, in place of its own plain text."""
        what = f"this is no HTTP/1.1 request, or its head has more than {HEAD_BYTES} bytes"
        body = json.dumps(ApiError(400, what, code="invalid_http").body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        answer = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _abort(self) -> None:
        self.transport.abort()

"""A proxy between two nodes that can stop forwarding without a word, as those do that forget idle connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from mlxcel_nb.cluster.address import Address


class Relay:
    """Forwards bytes both ways; each connection until it is cut."""

    def __init__(self, to: Address) -> None:
        self._to = to
        self._cut: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.connections = 0
        self.address = Address("127.0.0.1", 1)

    def cut(self) -> None:
        """Connections that are open stay so, and nothing passes any more; new ones work."""
        for event in self._cut:
            event.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        onward, back = await asyncio.open_connection(self._to.host, self._to.port)
        cut = asyncio.Event()
        self._cut.add(cut)
        self._writers += [writer, back]
        for source, target in ((reader, back), (onward, writer)):
            task = asyncio.ensure_future(self._forward(source, target, cut))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                if not cut.is_set():
                    target.write(data)
                    await target.drain()
            if not cut.is_set():
                target.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close on the loop's next turn


@contextlib.asynccontextmanager
async def relay(to: Address) -> AsyncIterator[Relay]:
    made = Relay(to)
    async with await asyncio.start_server(made.serve, "127.0.0.1") as server:
        made.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield made
        finally:
            await made.close()

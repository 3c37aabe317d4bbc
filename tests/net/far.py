"""A hot link whose other end is another process, for tests of further paths."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from mlxcel_nb.net.collectives.group import Tag
from mlxcel_nb.net.hot.hot_link import HotLink
from tests.net.helpers import SECRET, listening, run

REPO = Path(__file__).parents[2]
LIMIT_S = 20.0


class Far:
    """The other end of a hot link, in a process of its own: it agrees, and sends every tensor back.

    Args:
        way: what it agrees on, and what it may use for it.
    """

    def __init__(self, *way: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.net.further_end", *way], cwd=REPO, stdin=subprocess.PIPE, text=True
        )

    async def _join(self) -> HotLink:
        async with listening() as (_, address, links):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{SECRET.reveal().hex()}\n{address.port}\n")
            self.process.stdin.flush()
            link = await links.get()
            # The fixture closes what is left; this one outlives it.
            return HotLink(dataclasses.replace(link, sock=link.sock.dup()))

    def join(self) -> HotLink:
        return run(self._join())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        assert self.process.stdin is not None
        self.process.stdin.close()


def echo(hot: HotLink, step: int, data: bytes) -> bytes:
    hot.send_tensor(Tag(1, step, 1), "uint8", (len(data),), data, deadline=time.monotonic() + LIMIT_S)
    return bytes(hot.recv_tensor(Tag(1, step, 2), deadline=time.monotonic() + LIMIT_S).data)

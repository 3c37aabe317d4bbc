"""A small process whose receivers look into tensors and caches, as `net listen` does not.

Links whose first message says `"link": "hot"` get a HotLink on a thread of its own, which asks for one tensor after
the other; the others a ControlLink behind which caches are put together. Each end is a line on standard output.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import read_secret_file
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.wire.frames import Frame, Kind
from mlxcel_nb.wire.hello import Identity
from mlxcel_nb.wire.kv_assembler import Complete, KVAssembler, Refusal

MODEL = b"m" * 32
LAYERS = range(4)
LIMIT = 64 << 20
IDLE_S = 30.0


_one_at_a_time = threading.Lock()


def tell(link: Link, what: str, **more: Any) -> None:
    """A line from any thread; unbuffered, `print` writes a line and its end apart, and two threads' lines mix."""
    with _one_at_a_time:
        print(json.dumps({"node": link.peer.node_id, "what": what, **more}), flush=True)


def receive(link: Link) -> None:
    """Ask for 1.0.0, 1.1.0 and so on until the link ends; `data` is only told of tensors that are whole."""
    hot = HotLink(link)
    wait = link.peer.hello.get("wait", 0)
    step = 0
    try:
        if wait:  # a reader that asks for what never comes: whatever does come is kept
            hot.recv_tensor(Tag(1, 0, 0), deadline=time.monotonic() + wait)
        while True:
            tensor = hot.recv_tensor(Tag(1, step, 0), deadline=time.monotonic() + IDLE_S)
            digest = hashlib.sha256(tensor.data).hexdigest()
            tell(link, "tensor", step=step, dtype=tensor.dtype, dims=list(tensor.dims), sha256=digest)
            hot.send_control({"type": "taken", "step": step}, deadline=time.monotonic() + IDLE_S)
            step += 1
    except MlxcelError as error:
        tell(link, "end", error=type(error).__name__, cause=error.cause)
    finally:
        hot.close()


def gather(link: Link) -> None:
    """Put caches together; the answer to a transfer goes back on its channel."""
    assembler = KVAssembler(model=MODEL, layers=LAYERS, limit=LIMIT, epoch=7)

    def take(control: ControlLink, frame: Frame) -> None:
        if frame.kind is not Kind.KV:
            return
        event = assembler.add(frame.payload)
        if isinstance(event, Complete):
            arrays = b"".join(bytes(array) for layer in event.layers.values() for array in layer.arrays)
            tell(link, "cache", sha256=hashlib.sha256(arrays).hexdigest())
            control.send({"type": "ack", "message": event.ack})
        elif isinstance(event, Refusal):
            control.send({"type": "refuse", "why": int(event.why), "message": event.message})

    def ended(control: ControlLink, state: str, reason: str) -> None:
        if state in ("dead", "closed"):
            tell(link, "end", error=state, cause=reason)

    ControlLink(link, on_state=ended, on_frame=take)


def take(link: Link) -> None:
    if link.peer.hello.get("link") == "hot":
        threading.Thread(target=receive, args=(link,), daemon=True).start()
    else:
        gather(link)


async def main() -> None:
    identity = Identity(cluster="mlxcel", node_id="receiver", role="worker", incarnation=new_incarnation())
    listener = Listener(identity, [read_secret_file(Path(sys.argv[1]))], on_link=take)
    print(f"listening on {await listener.start()}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

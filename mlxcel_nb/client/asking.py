"""A request on its way to the node that leads the model: the order out, and a stream for what comes back.

Any thread may call. An interrupt anywhere in between leaves no request that nobody waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mlxcel_nb.client.report import Completion
from mlxcel_nb.client.router import Router
from mlxcel_nb.client.stream import Inbox, Stream
from mlxcel_nb.errors import MlxcelError, PeerLost, PromptError, WireError
from mlxcel_nb.runtime.protocol import GenerateOrder, field


def begin(
    router: Router,
    leader: str,
    order: GenerateOrder,
    *,
    explain: Callable[[MlxcelError], MlxcelError],
    ended: Callable[[Completion], None],
    stall_s: float,
    over: Callable[[], None] = lambda: None,
    replica: int | None = None,
) -> Stream:
    """Send `order` to the node `leader`.

    Args:
        explain, ended, stall_s, replica: as `Stream` takes them.
        over: called once, from any thread, when the leader has said the last word, whether anybody reads it or not.

    Raises:
        PromptError: too large to be sent. MlxcelError: the leader is lost.
    """

    def cancel() -> None:
        with contextlib.suppress(PeerLost):
            router.send(leader, {"type": "cancel", "id": order.id})

    def release() -> None:
        router.close_inbox(order.id)
        over()

    inbox = Inbox(leader, release)
    stream = Stream(
        inbox,
        cancel=cancel,
        progress=lambda: field(field(router.ask(leader, {"type": "status"}), "status", dict), "progress", int),
        explain=explain,
        ended=ended,
        stall_s=stall_s,
        replica=replica,
    )
    router.open_inbox(order.id, inbox.put)
    try:
        router.send(leader, order.to_dict())
        return stream
    except WireError as error:
        inbox.close()
        raise PromptError(f"the request cannot be sent: {error.cause}") from None
    except MlxcelError as error:
        inbox.close()
        raise explain(error) from None
    except BaseException:
        # An interrupt: the order may be on its way, and the traceback keeps the stream from its end.
        cancel()
        inbox.close()
        raise


def finish(stream: Stream) -> Completion:
    """Its end; an interrupt cancels the request on every rank."""
    try:
        return stream.result()
    except BaseException:
        stream.cancel()
        raise

"""A request on its way to the node that leads the model: the order out, and a stream for what comes back.

Any thread may call. An interrupt anywhere in between leaves no request that nobody waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from mlxcel_nb.client.report import Completion
from mlxcel_nb.client.router import Router
from mlxcel_nb.client.stream import Inbox, Line, Stream
from mlxcel_nb.errors import MlxcelError, PeerLost, PromptError, WireError
from mlxcel_nb.runtime.protocol import GenerateOrder, field


def open_line(
    router: Router,
    leader: str,
    order: GenerateOrder,
    *,
    explain: Callable[[MlxcelError], MlxcelError],
    ended: Callable[[Completion], None],
    over: Callable[[], None] = lambda: None,
    replica: int | None = None,
) -> Line:
    """Send `order` to the node `leader`.

    Args:
        explain, ended, replica: as `Line` takes them.
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

    def progress() -> int:
        return field(field(router.ask(leader, {"type": "status"}), "status", dict), "progress", int)

    inbox = Inbox(leader, release)
    router.open_inbox(order.id, inbox.put)
    try:
        router.send(leader, order.to_dict())
        return Line(inbox, cancel, progress, explain, ended, replica)
    except WireError as error:
        inbox.close()
        raise PromptError(f"the request cannot be sent: {error.cause}") from None
    except MlxcelError as error:
        inbox.close()
        raise explain(error) from None
    except BaseException:  # an interrupt: the order may be on its way
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

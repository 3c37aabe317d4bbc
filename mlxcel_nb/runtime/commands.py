"""What the MLX thread is told to do, and how it speaks. Any thread makes commands; the MLX thread takes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.orders import JoinOrder
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, OpenOrder
from mlxcel_nb.runtime.protocol import field as field_of


@dataclass
class Load:
    """Take a part of a model; `links` are this member's hot links by member index; `failed` hears when it does not.

    `cancelled` may be set from any thread.
    """

    order: LoadOrder
    me: int
    links: dict[int, HotLink]
    failed: Callable[[], None]
    cancelled: bool = False


@dataclass(frozen=True)
class Unload:
    """Drop the model; `done` is called on the MLX thread afterwards."""

    done: Callable[[], None]


@dataclass(frozen=True)
class Open:
    """On the leader: take requests from now on, within the room that all members have."""

    order: OpenOrder


@dataclass
class Generate:
    """One request, on the leader, of the router `owner`. `cancelled` may be set from any thread."""

    order: GenerateOrder
    owner: str
    received_s: float = field(default_factory=time.monotonic)
    cancelled: bool = False


@dataclass(frozen=True)
class Cancel:
    """End the request with this id, on the leader."""

    request: str


@dataclass(frozen=True)
class Kv:
    """A question of the router `owner` about saved keys and values; `reply` may be called on any thread."""

    message: dict[str, Any] = field(repr=False)
    owner: str
    reply: Callable[[dict[str, Any]], None]


def kv_question(router: ControlLink, message: dict[str, Any], soon: Callable[..., None]) -> Kv:
    """A router's question, to be answered on its link.

    Args:
        soon: calls a function on the node's loop, from any thread.
    """
    asked = field_of(message, "id", str)
    return Kv(message, router.peer.node_id, lambda answer: soon(router.send, {"id": asked, **answer}))


@dataclass(frozen=True)
class Join:
    """Work together with other instances, over these links: by instance and node, to those for which this one reads,
    and from those that read for it.

    Args:
        ready, failed: called once, on any thread.
    """

    order: JoinOrder
    outgoing: dict[tuple[str, str], Link]
    incoming: dict[tuple[str, str], Link]
    ready: Callable[[], None]
    failed: Callable[[MlxcelError], None]


@dataclass(frozen=True)
class Brought:
    """A frame of whoever reads a prompt for this instance, on the leader."""

    message: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Landed:
    """A member has all that was expected of a transfer, on the leader."""

    node_id: str
    epoch: int
    transfer: int


@dataclass(frozen=True)
class Sent:
    """What a member was to send of a transfer to instance `to` has been taken, or has not; on the leader."""

    node_id: str
    to: str
    transfer: int
    account: Account | None
    error: MlxcelError | None


@dataclass(frozen=True)
class Stop:
    """End the thread."""


Command = Load | Unload | Open | Generate | Cancel | Kv | Join | Brought | Landed | Sent | Stop


@dataclass(frozen=True)
class Outbox:
    """How the MLX thread speaks. Each callable may be called from any thread and returns at once."""

    to_router: Callable[[dict[str, Any]], None]
    stream: Callable[[dict[str, Any]], None]
    to_leader: Callable[[dict[str, Any]], None]
    to_members: Callable[[dict[str, Any]], None]
    to_reader: Callable[[dict[str, Any]], None]
    broken: Callable[[str, str], None]
    died: Callable[[dict[str, Any]], None]
    trouble: Callable[[], None]

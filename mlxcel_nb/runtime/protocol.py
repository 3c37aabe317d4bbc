"""The messages of the data plane's control and stream frames, as types. Pure.

Every message is a map with a `type`; docs/wire.md tells users the same. What a node obeys depends on who says it:

========== ================= ==========================================================================
type       from -> to        meaning
========== ================= ==========================================================================
digest     router -> node    what is in this model folder; answered by progress ..., then reply
load       router -> node    take this part of this model; answered by progress ..., then loaded or error
progress   node -> router    so many bytes of the part have been loaded, or of the folder read
loaded     node -> router    the part is ready: its layers, bytes and dtype, and what room is left for caches
unload     router -> node    drop the model; answered by reply
open       router -> leader  all have loaded: take requests, within this room; answered by reply
generate   router -> leader  make text; answered by stream frames prefill ..., delta ..., end
generate   leader -> leader  read this prompt for another instance; answered by stream frames prefill ..., first, end
first      leader -> leader  (stream) the prompt has been read, and this token follows it
join       router -> member  read for these instances, and have those read for you; answered by joined or error
joined     member -> router  its links are open, and everybody has said what he keeps and what he wants
prefill    leader -> router  (stream) so much of a long prompt has been read
delta      leader -> router  (stream) text and ids of a request
end        leader -> router  (stream) a request is over, why, and its figures
cancel     router -> leader  end that request now, keep what there is
status     router -> node    answered by reply
place      router -> node    where can you be reached; answered by reply
measure    router -> node    how fast is your way to that node (a visitor may ask too); answered by reply
heartbeat  node -> node      I live, so far is my work, and so much there is of it; every 5 s
addresses  node -> node      my host's addresses: I may come from any of them
spans      router -> node    where the time of steps went, from a number on; answered by reply
recorded   router -> member  give a piece of what a request with `forced` tokens gave here; answered by reply
kv         router -> member  save or load keys and values, piece by piece (`runtime.kv_store`); answered by reply
reply      node -> router    the answer to digest, unload, status, place, measure, spans or recorded, by its `id`
error      node -> any       the message with this `id` is refused or has failed
failed     member -> leader  my part of this epoch raised this error
landed     member -> leader  all that I was to expect of this sequence is here
sent       member -> leader  all that I was to send of this sequence has been taken, or has not
holds      member -> member  (kv link) I read for you, and keep these parts of the caches
wants      member -> member  (kv link) send me these of them
abort      leader -> member  leave this epoch; on the hot link too
step       leader -> member  (hot link) run this plan
tokens     sampler -> leader (hot link) what was sampled in this step; nothing, where it was a part of a prompt
========== ================= ==========================================================================

An epoch is the life of all caches of an instance between two failures; numbers grow, so whatever is left over from an
aborted one is recognised as stale and dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.cluster.address import parse_address
from mlxcel_nb.cluster.collectives import COLLECTIVES, OWN
from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.cluster.paths import Agreement, Path, read_path
from mlxcel_nb.cluster.places import OTHER
from mlxcel_nb.cluster.roles import GROUP_ROLES, HYBRID
from mlxcel_nb.errors import PromptError, RequestError, WireError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.scheduling.sequence import HandTo

MOST_TRANSFERS = 1 << 26
"""Of an instance, counted from 0 since it was loaded."""

LARGEST_ID = 2**31 - 1
"""Of a token: MLX looks rows of an embedding up by 32 bits with a sign."""


def field(message: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """The value of `name`, of type `kind`.

    Raises:
        WireError: absent or of another type; the message's type and the field are named.
    """
    value = message.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WireError(f"message {message.get('type')!r}: field {name!r} is {type(value).__name__}")
    return value


@dataclass(frozen=True, kw_only=True)
class Member:
    """One place of a layout's mesh: a node and where its data plane listens."""

    node_id: str
    address: str


@dataclass(frozen=True, kw_only=True)
class LoadOrder:
    """What one node needs to know to hold its part of a model instance.

    Args:
        id: correlates the answers.
        instance: names this loading of the model; hot links carry it in their first frame.
        model: folder on the node.
        members: mesh order, see `Layout`.
        step_s: a step without progress fails after this many seconds.
        allow_code: the user lets the folder's own Python code run; the code itself is never sent.
        paths: the ways from one member to another, best first, agreed once for all members.
        collectives: who adds partial sums up, one of `COLLECTIVES`.
        vocab_parallel: tensor ranks share the embedding and the head too.
        micro_batches: groups of requests that are under way at once, so that all stages work; 0 chooses.
        role: what the instance is for: "prefill", "decode" or "hybrid".
    """

    id: str
    instance: str
    model: str
    layout: Layout
    members: tuple[Member, ...]
    dtype: str
    step_s: float
    allow_code: bool = False
    paths: Agreement = dataclasses.field(default_factory=dict)
    collectives: str = OWN
    vocab_parallel: bool = False
    micro_batches: int = 0
    role: str = HYBRID

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "load",
            "id": self.id,
            "instance": self.instance,
            "model": self.model,
            "layout": self.layout.to_dict(),
            "members": [[m.node_id, m.address] for m in self.members],
            "dtype": self.dtype,
            "step_s": self.step_s,
            "allow_code": self.allow_code,
            "paths": [[a, b, [path.to_list() for path in ways]] for (a, b), ways in sorted(self.paths.items())],
            "collectives": self.collectives,
            "vocab_parallel": self.vocab_parallel,
            "micro_batches": self.micro_batches,
            "role": self.role,
        }

    @classmethod
    def from_dict(cls, message: dict[str, Any]) -> LoadOrder:
        layout = Layout.from_dict(field(message, "layout", dict))
        members = tuple(Member(node_id=str(n), address=str(a)) for n, a in field(message, "members", list))
        if len(members) != layout.size:
            raise WireError(f"load: {len(members)} members for a layout of {layout.size}")
        if (collectives := message.get("collectives", OWN)) not in COLLECTIVES:
            raise WireError(f"load: collectives {collectives!r:.40} are unknown here")
        if (role := message.get("role", HYBRID)) not in (HYBRID, *GROUP_ROLES):
            raise WireError(f"load: role {role!r:.40} is unknown here")
        return cls(
            id=field(message, "id", str),
            instance=field(message, "instance", str),
            model=field(message, "model", str),
            layout=layout,
            members=members,
            dtype=field(message, "dtype", str),
            step_s=float(field(message, "step_s", (int, float))),
            allow_code=field(message, "allow_code", bool),
            paths=_read_paths(message.get("paths", [])),
            collectives=collectives,
            vocab_parallel=field(message, "vocab_parallel", bool) if "vocab_parallel" in message else False,
            micro_batches=_count(message, "micro_batches"),
            role=role,
        )

    def sources(self, me: int) -> dict[str, set[str]]:
        """The addresses from which the members that dial `me` may come, by node id."""
        dialled = [(a, path.source) for (a, b), ways in self.paths.items() if b == me for path in ways if path.source]
        found: dict[str, set[str]] = {}
        for a, source in dialled:
            found.setdefault(self.members[a].node_id, set()).add(source)
        return found

    def ways(self, a: int, b: int) -> tuple[Path, ...]:
        """The ways from member `a` to member `b`, best first; its published address where nothing was agreed."""
        if agreed := self.paths.get((a, b)):
            return agreed
        address = parse_address(self.members[b].address)
        return (Path(address=address, kind=OTHER, interface="", peer_interface="", reason="as published"),)

    def place(self, node_id: str) -> int:
        """Index of `node_id` in the mesh."""
        for index, member in enumerate(self.members):
            if member.node_id == node_id:
                return index
        raise WireError(f"load: {node_id} is not a member of this layout")


def _count(message: dict[str, Any], name: str) -> int:
    """A whole number from 0, which is what stands for a field that is not there."""
    count = field(message, name, int) if name in message else 0
    if not 0 <= count < 1 << 31:
        raise WireError(f"message {message.get('type')!r}: field {name!r} is {count}")
    return int(count)


def _read_paths(told: Any) -> Agreement:
    try:
        return {(int(a), int(b)): tuple(read_path(each) for each in ways) for a, b, ways in told}
    except (TypeError, ValueError):
        raise WireError("load: its paths cannot be read") from None


@dataclass(frozen=True, kw_only=True)
class GenerateOrder:
    """One request. Exactly one of `prompt`, `messages` and `token_ids` is given.

    Args:
        made: tokens of the answer that have been made elsewhere: it goes on after them. With a seed in `params` its
            text is what it would have been there.
        forced: ids that are fed in place of those sampled; every member then notes what it saw (`runtime.recording`).
        rank: the expert-parallel rank that is to hold the request's keys and values; they take turns when None.
        caller: for whom the router asks, as far as it tells: callers are served in turn.
        readers: instances that may read the prompt for this one, best first; this one reads it where none can.
        hand: where the keys and values go when they have been read; then one token is made, and told to who asks.
    """

    id: str
    instance: str
    params: SamplingParams
    prompt: str | None = dataclasses.field(default=None, repr=False)
    messages: list[dict[str, Any]] | None = dataclasses.field(default=None, repr=False)
    token_ids: list[int] | None = dataclasses.field(default=None, repr=False)
    made: list[int] | None = dataclasses.field(default=None, repr=False)
    forced: list[int] | None = dataclasses.field(default=None, repr=False)
    rank: int | None = None
    caller: str | None = None
    readers: list[str] | None = None
    hand: HandTo | None = None

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.prompt, self.messages, self.token_ids)) != 1:
            raise RequestError("give exactly one of a prompt, messages, or token ids")
        if self.token_ids is not None:
            _check_ids(self.token_ids)
        if self.made is not None:
            _check_ids(self.made)
        if self.forced is not None:
            _check_ids(self.forced)
            if len(self.forced) < self.params.max_tokens:
                raise RequestError(f"{self.params.max_tokens} tokens are to be fed, and {len(self.forced)} given")

    @functools.cached_property
    def weight(self) -> int:
        """Characters or token ids of what is to be read: what it takes to keep it waiting."""
        made = len(self.made or ())
        if self.messages is not None:
            return made + sum(len(str(message)) for message in self.messages)
        return made + len(self.prompt if self.prompt is not None else self.token_ids or ())

    def to_dict(self) -> dict[str, Any]:
        message: dict[str, Any] = {
            "type": "generate",
            "id": self.id,
            "instance": self.instance,
            "params": self.params.to_dict(),
        }
        for name in ("prompt", "messages", "token_ids", "made", "forced", "rank", "caller", "readers"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.hand is not None:
            message["hand"] = list(self.hand)
        return message

    @classmethod
    def from_dict(cls, message: dict[str, Any]) -> GenerateOrder:
        return cls(
            id=field(message, "id", str),
            instance=field(message, "instance", str),
            params=SamplingParams.from_dict(field(message, "params", dict)),
            prompt=field(message, "prompt", str) if "prompt" in message else None,
            messages=field(message, "messages", list) if "messages" in message else None,
            token_ids=field(message, "token_ids", list) if "token_ids" in message else None,
            made=field(message, "made", list) if "made" in message else None,
            forced=field(message, "forced", list) if "forced" in message else None,
            rank=field(message, "rank", int) if "rank" in message else None,
            caller=field(message, "caller", str) if "caller" in message else None,
            readers=[str(each) for each in field(message, "readers", list)] if "readers" in message else None,
            hand=_read_hand(field(message, "hand", list)) if "hand" in message else None,
        )


def _read_hand(told: list[Any]) -> HandTo:
    kinds = (str, int, int, str)
    if len(told) != len(kinds) or any(type(x) is not kind for x, kind in zip(told, kinds, strict=True)):
        raise WireError("message 'generate': where it goes cannot be read")
    hand = HandTo(*told)
    if not (0 <= hand.epoch < 1 << 53 and 0 <= hand.transfer < MOST_TRANSFERS):
        raise WireError(f"message 'generate': transfer {hand.transfer} of epoch {hand.epoch}")
    return hand


def _check_ids(ids: list[int]) -> None:
    if any(isinstance(each, str | list | tuple) for each in ids):
        raise PromptError("one request has one prompt", advice="LLM.generate takes a list of them.")
    if not all(type(each) is int and 0 <= each <= LARGEST_ID for each in ids):
        raise PromptError(f"token ids must be a list of whole numbers from 0 to {LARGEST_ID}")


@dataclass(frozen=True, kw_only=True)
class OpenOrder:
    """What the leader needs to know before it takes requests.

    Args:
        rooms: of every member, in mesh order, what it has left for keys and values; None where it cannot say.
    """

    id: str
    instance: str
    rooms: tuple[Room | None, ...]

    def to_dict(self) -> dict[str, Any]:
        rooms = [room and room.to_dict() for room in self.rooms]
        return {"type": "open", "id": self.id, "instance": self.instance, "rooms": rooms}

    @classmethod
    def from_dict(cls, message: dict[str, Any]) -> OpenOrder:
        return cls(
            id=field(message, "id", str),
            instance=field(message, "instance", str),
            rooms=tuple(Room.from_dict(each) for each in field(message, "rooms", list)),
        )


def failed_end(request_id: Any, error: dict[str, Any]) -> dict[str, Any]:
    """The one frame of an answer that never began, or whose maker died: it has no number."""
    return {
        "type": "end",
        "id": request_id,
        "seq": None,
        "text": "",
        "tokens": [],
        "finish_reason": "error",
        "error": error,
    }

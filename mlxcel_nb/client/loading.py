"""Splitting a model over nodes, from the router's side: orders out, progress in, a report or one error."""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.client.plans import Group, Plan
from mlxcel_nb.client.report import LoadProgress, LoadReport, PartReport
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.client.sameness import check_same, progress_of
from mlxcel_nb.cluster.address import parse_address
from mlxcel_nb.cluster.collectives import OWN, warning
from mlxcel_nb.cluster.layout import Layout
from mlxcel_nb.cluster.paths import ASKED_FOR_THUNDERBOLT, Agreement, agree
from mlxcel_nb.cluster.places import Place
from mlxcel_nb.cluster.roles import PREFILL
from mlxcel_nb.errors import ConfigError, MlxcelError, PeerLost, StepTimeout
from mlxcel_nb.launch.local import EngineInfo
from mlxcel_nb.plan.capacity import LONGEST, Room, shared
from mlxcel_nb.runtime.protocol import LoadOrder, Member, OpenOrder, field
from mlxcel_nb.scheduling.pipeline import MOST, micro_batches

STALL_S = 60.0
"""Loading fails when no node reports progress for this long."""

POLL_S = 0.2

PLACES_S = 15.0
"""For all nodes to say where they can be reached; each may have to ask its system first."""

REQUEST_TOKENS = 4096
"""Of the requests that are counted when a model has loaded, unless it was made for shorter ones."""

Loaded = dict[str, dict[str, Any]]
"""What each node said it loaded."""


def orders(router: Router, plan: Plan, engines: Sequence[EngineInfo], **choices: Any) -> tuple[LoadOrder, ...]:
    """What the first of `engines` that live are told to load, one order for each replica.

    Args:
        choices: the other fields of the orders.

    Raises:
        ConfigError: there are too few of them.
    """
    alive = [engine for engine in engines if engine.node_id in router.alive()]
    if plan.engines > len(engines):
        raise ConfigError(
            f"{plan.name} needs {plan.engines} engines, this cluster has {len(engines)}",
            advice=f"Start one with {plan.engines}, or split the model less.",
        )
    if plan.engines > len(alive):
        dead = ", ".join(engine.node_id for engine in engines if engine not in alive)
        raise ConfigError(
            f"{plan.name} needs {plan.engines} engines, but {dead} is dead",
            advice="Stop the cluster and start it again, or split the model less.",
        )
    made, left = [], iter(alive)
    for group in plan.groups:
        theirs = list(itertools.islice(left, group.layout.size))
        made.append(_order(router, plan, group, theirs, choices))
    return tuple(made)


def _order(
    router: Router, plan: Plan, group: Group, engines: Sequence[EngineInfo], choices: Mapping[str, Any]
) -> LoadOrder:
    members = tuple(Member(node_id=engine.node_id, address=str(engine.address)) for engine in engines)
    return LoadOrder(
        id=new_id(),
        instance=new_id(),
        model=str(plan.path),
        layout=group.layout,
        members=members,
        role=group.role,
        paths=agree_paths(router, members, group.layout.edges()),
        micro_batches=plan.micro_batches,
        **choices,
    )


def agree_paths(router: Router, members: Sequence[Member], edges: Sequence[tuple[int, int]]) -> Agreement:
    """The ways between members that talk to each other, from what each says of its host: agreed here, told to all.

    Engines of this machine are on loopback and need not be asked; a node that does not say is taken at its published
    address.

    Raises:
        ConfigError: two that must talk cannot reach each other, and why.
    """
    answers: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    places = {member.node_id: _published(member) for member in members}
    local = all(parse_address(member.address).is_loopback for member in members)
    asked = {} if local else {new_id(): member for member in members}
    try:
        for request_id, member in asked.items():
            router.open_inbox(request_id, lambda node, message: answers.put((node, message)))
            router.send(member.node_id, {"type": "place", "id": request_id})
        end = time.monotonic() + PLACES_S
        with contextlib.suppress(queue.Empty):
            for _ in asked:
                node, message = answers.get(timeout=max(0.0, end - time.monotonic()))
                if isinstance(told := message.get("place"), dict):
                    places[node] = Place.from_dict(node, told)
    finally:
        for request_id in asked:
            router.close_inbox(request_id)
    return agree([places[member.node_id] for member in members], edges)


def _published(member: Member) -> Place:
    address = parse_address(member.address)
    return Place(node_id=member.node_id, host="", listens=address.host, port=address.port)


def path_warnings(order: LoadOrder) -> list[str]:
    """What a user who asked for a transport should know: between whom it is another, and why."""
    return [
        f"{order.members[a].node_id} and {order.members[b].node_id}: {ways[0]}; {ways[0].reason}"
        for (a, b), ways in sorted(order.paths.items())
        if ASKED_FOR_THUNDERBOLT in ways[0].reason
    ]


def load_parts(
    router: Router,
    orders: Sequence[LoadOrder],
    on_progress: Callable[[LoadProgress], None] | None,
    explain: Callable[[MlxcelError], MlxcelError],
) -> tuple[Loaded, str]:
    """Compare all members' files, send each its order, wait until all have loaded, and have the leaders begin.

    Args:
        orders: of the replicas of one model.

    Returns:
        What each node said, and the hex SHA-256 of the model, "" of one that a single node has.

    Raises:
        MlxcelError: the first thing that went wrong, with what that node was doing.
    """
    digest = check_same(router, orders, on_progress, explain, stall_s=STALL_S)
    inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    doing = dict.fromkeys((member.node_id for order in orders for member in order.members), "starting to load")
    loaded: Loaded = {}
    heard = time.monotonic()
    try:
        for order in orders:
            router.open_inbox(order.id, lambda node, message: inbox.put((node, message)))
            for member in reversed(order.members):  # those that are dialled hear of it before those that dial
                router.send(member.node_id, order.to_dict())
        while len(loaded) < len(doing):
            try:
                node, message = inbox.get(timeout=POLL_S)
            except queue.Empty:
                if time.monotonic() - heard > STALL_S:
                    stuck = next(node for node in doing if node not in loaded)
                    raise StepTimeout(f"no progress for {STALL_S:g} s while {doing[stuck]}", node=stuck) from None
                continue
            heard = time.monotonic()
            kind = message.get("type")
            if kind == "loaded":
                loaded[node] = _checked(message)
            elif kind == "progress":
                news = progress_of(node, message)
                doing[node] = f"loading {news.what}"
                if on_progress is not None:
                    on_progress(news)
            elif kind == "lost" and node in doing:
                error = explain(errors.from_dict(field(message, "error", dict)))
                raise type(error)(f"{error.cause} while {doing[node]}", node=node, advice=error.advice)
            elif kind == "error":
                raise explain(errors.from_dict(field(message, "error", dict)))
    finally:
        for order in orders:
            router.close_inbox(order.id)
    for order, rooms in zip(orders, _rooms(orders, loaded), strict=True):
        _open_leader(router, order, rooms, explain)
    return loaded, digest


def _checked(loaded: dict[str, Any]) -> dict[str, Any]:
    """What a node says it loaded, when it says it in full."""
    for name, kind in (("planned_bytes", int), ("resident_bytes", int), ("dtype", str), ("warnings", list)):
        field(loaded, name, kind)
    return loaded


def _open_leader(
    router: Router, order: LoadOrder, rooms: Sequence[Room | None], explain: Callable[[MlxcelError], MlxcelError]
) -> None:
    """Have the leader take requests, now that all members have loaded and said what room they have left."""
    opening = OpenOrder(id=new_id(), instance=order.instance, rooms=tuple(rooms))
    try:
        router.ask(order.members[0].node_id, opening.to_dict(), timeout=order.step_s)
    except MlxcelError as error:
        raise explain(error) from None


def _rooms(orders: Sequence[LoadOrder], loaded: Loaded) -> list[list[Room | None]]:
    """For each order, what each member has for caches, of what its host has for all of them."""
    members = [member for order in orders for member in order.members]
    told = [Room.from_dict(loaded[member.node_id].get("room")) for member in members]
    own = iter(shared(told, [_host(member) for member in members]))
    return [[next(own) for _ in order.members] for order in orders]


def drop_parts(router: Router, orders: Sequence[LoadOrder], timeout: float) -> None:
    """Make every node that is there and holds part of what `orders` say free again.

    Raises:
        MlxcelError: the first node that did not do so, after all have been asked. A node that is lost holds nothing.
    """
    first: MlxcelError | None = None
    for order in orders:
        for member in order.members:
            try:
                router.ask(member.node_id, {"type": "unload", "instance": order.instance}, timeout=timeout)
            except PeerLost:
                continue
            except MlxcelError as error:
                first = first or error
    if first is not None:
        raise first


def _host(member: Member) -> str:
    """Which members share memory: those of one address, whatever their ports."""
    address = parse_address(member.address)
    return "loopback" if address.is_loopback else address.host


def reports(plan: Plan, orders: Sequence[LoadOrder], loaded: Loaded, load_s: float) -> list[LoadReport]:
    """What there is to say of each replica of a finished load."""
    return [
        _report(plan, order, loaded, rooms, load_s, None if len(orders) == 1 else number)
        for number, order, rooms in zip(_numbers(orders), orders, _rooms(orders, loaded), strict=True)
    ]


def _numbers(orders: Sequence[LoadOrder]) -> list[int]:
    """Copies are counted by what they are for."""
    return [sum(each.role == order.role for each in orders[:index]) for index, order in enumerate(orders)]


def joined(plan: Plan, replicas: Sequence[LoadReport]) -> LoadReport:
    """What the user sees: all replicas as one model; there is room where answers are made."""

    def least(counts: Sequence[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return min(known) if len(known) == len(counts) else None

    answering = [each for each in replicas if each.role != PREFILL]
    together = [each.requests for each in answering]
    return replace(
        answering[0],
        layout=plan.name,
        parts=tuple(part for each in replicas for part in each.parts),
        replicas=plan.replicas,
        readers=len(replicas) - plan.replicas,
        warnings=tuple(dict.fromkeys(warning for each in replicas for warning in each.warnings)),
        kv_tokens=least([each.kv_tokens for each in answering]),
        memory_tokens=least([each.memory_tokens for each in answering]),
        requests=None if None in together else min(sum(filter(None, together)), LONGEST),
    )


def _report(
    plan: Plan, order: LoadOrder, loaded: Loaded, rooms: Sequence[Room | None], load_s: float, replica: int | None
) -> LoadReport:
    layout = order.layout
    mine = [loaded[member.node_id] for member in order.members]
    known = [room for room in rooms if room]
    asked = min(plan.context or REQUEST_TOKENS, REQUEST_TOKENS)
    parts = tuple(
        PartReport(
            node_id=member.node_id,
            stage=layout.stage_of(index),
            rank=layout.rank_of(index),
            layers=layout.stages[layout.stage_of(index)],
            planned_bytes=loaded[member.node_id]["planned_bytes"],
            resident_bytes=loaded[member.node_id]["resident_bytes"],
            kv_per_token=room.per_token if room else 0,
            kv_tokens=room.tokens(plan.context) if room else None,
            memory_tokens=room.tokens() if room else None,
            requests=room.sequences(asked) if room else None,
            replica=replica,
            role=order.role,
        )
        for index, (member, room) in enumerate(zip(order.members, rooms, strict=True))
    )
    warnings = [each for facts in mine for each in facts["warnings"]] + path_warnings(order)
    warnings += warning(order.collectives, layout.tp)
    groups = _micro_batches(order, loaded)
    if order.micro_batches > groups:
        warnings.append(f"its layers run several times over, so there is 1 micro-batch, not {order.micro_batches}")
    if order.vocab_parallel and layout.tp == 1:
        warnings.append(
            f"{layout.name} has no tensor ranks to share a vocabulary; --vocab-parallel is for --tp 2 and up"
        )
    return LoadReport(
        model=plan.model,
        path=str(plan.path),
        layout=layout.name,
        dtype=loaded[order.members[0].node_id]["dtype"],
        parts=parts,
        load_s=load_s,
        collectives=order.collectives if layout.tp > 1 else OWN,
        warnings=tuple(dict.fromkeys(warnings)),
        kv_tokens=min(room.tokens(plan.context) for room in known) if len(known) == len(rooms) else None,
        memory_tokens=min(room.tokens() for room in known) if len(known) == len(rooms) else None,
        vocab_parallel=any(facts.get("vocab_parallel") is True for facts in mine),
        request_tokens=asked,
        requests=_at_once(layout, [room.sequences(asked) for room in known]) if len(known) == len(rooms) else None,
        stages=layout.pp,
        micro_batches=groups,
        role=order.role,
    )


def _at_once(layout: Layout, each: Sequence[int]) -> int:
    """Requests for which there is room: every member keeps a part of each, expert-parallel ranks some of them whole."""
    return min(sum(each), LONGEST) if layout.ep > 1 else min(each)


def _micro_batches(order: LoadOrder, loaded: Loaded) -> int:
    """Groups that go through the stages in turn; one where layers run several times over."""
    once = loaded[order.members[0].node_id].get("laps", 1) == 1
    return micro_batches(order.layout.pp, MOST, order.micro_batches) if once else 1

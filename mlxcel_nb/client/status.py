"""What every node and link of a cluster says of itself, gathered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcel_nb.client.engine_report import figure_of
from mlxcel_nb.client.report import LinkReport, NodeReport, VersionReport
from mlxcel_nb.client.router import Router
from mlxcel_nb.cluster.collectives import OWN, UNENCRYPTED
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.launch.local import EngineInfo
from mlxcel_nb.runtime.protocol import field

ANSWER_S = 2.0
"""A node that says nothing for this long is shown as it was last seen."""


def gather(
    router: Router, engines: Sequence[EngineInfo], exits: Mapping[str, str]
) -> tuple[tuple[NodeReport, ...], tuple[LinkReport, ...]]:
    """Ask every node for itself and its links.

    Args:
        exits: how the processes that ended did so.
    """
    nodes: list[NodeReport] = []
    links: dict[frozenset[str], LinkReport] = {}
    for engine in engines:
        facts = _ask(router, engine.node_id)
        nodes.append(_node(router, engine, facts, exits))
        found = [(router.node_id, engine.node_id, router.link_info(engine.node_id))]
        found += [(engine.node_id, peer, info) for peer, info in facts.get("links", {}).items()]
        for source, target, info in found:
            if info:
                links.setdefault(frozenset((source, target)), _link(source, target, info))
    return tuple(nodes), tuple(links.values())


def _ask(router: Router, node_id: str) -> dict[str, Any]:
    if node_id in router.alive():
        with contextlib.suppress(MlxcelError):
            answer = router.ask(node_id, {"type": "status"}, timeout=ANSWER_S)
            facts: dict[str, Any] = field(answer, "status", dict)
            return facts
    return {}


def _node(router: Router, engine: EngineInfo, facts: dict[str, Any], exits: Mapping[str, str]) -> NodeReport:
    node_id = engine.node_id
    state, reason = router.state(node_id)
    if state == "alive" and (stalled := str(facts.get("stalled") or "")):
        state, reason = "stalled", stalled
    links, work = facts.get("links"), facts.get("work")
    model = facts.get("model") or {}
    return NodeReport(
        node_id=node_id,
        state=state,
        reason=exits.get(node_id, reason),
        address=str(engine.address),
        host=facts.get("host", engine.host),
        pid=engine.pid,
        platform=facts.get("platform", ""),
        activity=_activity(facts),
        threads=facts.get("threads", 0),
        blas=facts.get("blas", ""),
        memory_bytes=facts.get("memory_bytes", 0),
        arrays_bytes=facts.get("arrays_bytes", 0),
        free_bytes=facts.get("free_bytes", 0),
        device=facts.get("device", ""),
        versions=router.versions(node_id),
        stage=model.get("stage"),
        rank=model.get("rank"),
        layers=tuple(model["layers"]) if model else None,
        error=facts.get("error") or "",
        collectives=model.get("collectives") or "",
        surroundings=facts.get("surroundings") or {},
        instance=str(model.get("instance") or ""),
        work=work if isinstance(work, dict) else {},
        received_bytes={str(peer): _received(info) for peer, info in links.items()} if isinstance(links, dict) else {},
    )


def _activity(facts: dict[str, Any]) -> str:
    """What a node is at; with how many requests, where it leads them."""
    activity, work = str(facts.get("activity") or ""), facts.get("work")
    engine = work.get("engine") if isinstance(work, dict) else None
    if not isinstance(engine, dict) or activity not in ("prefill", "decode"):
        return activity
    return f"{activity}: {figure_of(engine, 'running'):.0f} running, {figure_of(engine, 'waiting'):.0f} waiting"


def _received(info: Any) -> int:
    """Bytes that came from a member: on the hot link, and on the witness beside it."""
    return int(figure_of(info, "received_bytes") + figure_of(info, "hot_received_bytes"))


def group_links(nodes: Sequence[NodeReport]) -> tuple[LinkReport, ...]:
    """What leads from rank to rank within groups of MLX's own, which are no links of ours and not encrypted."""
    ranks: dict[tuple[str, int | None], list[NodeReport]] = {}
    for node in nodes:
        if node.collectives not in ("", OWN):
            ranks.setdefault((node.collectives, node.stage), []).append(node)
    return tuple(
        LinkReport(source=a.node_id, target=b.node_id, cipher=UNENCRYPTED, transport=name, rtt_s=None)
        for (name, _), members in ranks.items()
        for a, b in _around(sorted(members, key=lambda member: member.rank or 0))
    )


def _around(members: Sequence[NodeReport]) -> list[tuple[NodeReport, NodeReport]]:
    """Each with the next; of more than two, the last with the first too."""
    pairs = list(itertools.pairwise(members))
    return [*pairs, (members[-1], members[0])] if len(members) > 2 else pairs


def _link(source: str, target: str, info: dict[str, Any]) -> LinkReport:
    return LinkReport(
        source=source,
        target=target,
        cipher=str(info.get("cipher", "")),
        transport=str(info.get("transport", "")),
        rtt_s=info.get("rtt_s"),
        shape=str(info.get("shape", "")),
        path=str(info.get("path", "")),
        why=str(info.get("why", "")),
    )


def differing(versions: Mapping[str, Mapping[str, str]]) -> tuple[VersionReport, ...]:
    """Libraries that are not the same everywhere: who has which.

    Args:
        versions: of each node, by library.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for node_id, libraries in versions.items():
        for library, version in libraries.items():
            found.setdefault(library, {}).setdefault(version, []).append(node_id)
    return tuple(
        VersionReport(library=library, version=version, nodes=tuple(nodes))
        for library, by in sorted(found.items())
        if len(by) > 1
        for version, nodes in sorted(by.items())
    )


def warnings(
    nodes: Sequence[NodeReport], versions: Sequence[VersionReport], exits: Mapping[str, str]
) -> tuple[str, ...]:
    """What a user should know: libraries that differ, a control plane that has ended."""
    lines = [
        f"{library} differs: " + ", ".join(f"{each.version} on {' '.join(each.nodes)}" for each in group)
        for library, group in itertools.groupby(versions, lambda each: each.library)
    ]
    lines += [f"{name}: {how}" for name, how in exits.items() if name not in {node.node_id for node in nodes}]
    return tuple(lines)

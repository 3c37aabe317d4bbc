"""What every node and link of a cluster says of itself, gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcel_nb.client.report import LinkReport, NodeReport
from mlxcel_nb.client.router import Router
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.launch.local import EngineInfo

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
            facts: dict[str, Any] = router.ask(node_id, {"type": "status"}, timeout=ANSWER_S)["status"]
            return facts
    return {}


def _node(router: Router, engine: EngineInfo, facts: dict[str, Any], exits: Mapping[str, str]) -> NodeReport:
    node_id = engine.node_id
    state, reason = router.state(node_id)
    model = facts.get("model") or {}
    return NodeReport(
        node_id=node_id,
        state=state,
        reason=exits.get(node_id, reason) or facts.get("error") or "",
        address=str(engine.address),
        host=facts.get("host", engine.host),
        pid=engine.pid,
        platform=facts.get("platform", ""),
        activity=facts.get("activity", ""),
        threads=facts.get("threads", 0),
        blas=facts.get("blas", ""),
        memory_bytes=facts.get("memory_bytes", 0),
        versions=router.versions(node_id),
        stage=model.get("stage"),
        rank=model.get("rank"),
        layers=tuple(model["layers"]) if model else None,
    )


def _link(source: str, target: str, info: dict[str, Any]) -> LinkReport:
    return LinkReport(
        source=source,
        target=target,
        cipher=str(info.get("cipher", "")),
        transport=str(info.get("transport", "")),
        rtt_s=info.get("rtt_s"),
    )


def warnings(nodes: Sequence[NodeReport], exits: Mapping[str, str]) -> tuple[str, ...]:
    """What a user should know: libraries that differ between nodes, a control plane that has ended."""
    found: dict[str, dict[str, list[str]]] = {}
    for node in nodes:
        for library, version in node.versions.items():
            found.setdefault(library, {}).setdefault(version, []).append(node.node_id)
    lines = [
        f"{library} differs: " + ", ".join(f"{version} on {' '.join(who)}" for version, who in sorted(by.items()))
        for library, by in sorted(found.items())
        if len(by) > 1
    ]
    lines += [f"{name}: {how}" for name, how in exits.items() if name not in {node.node_id for node in nodes}]
    return tuple(lines)

"""Engines that a cluster has lost, and what is left to do: the words of `Cluster`'s errors. Any thread may call.

An engine that counts as lost stays so, even if its process runs on: a cluster of a notebook takes none back. What the
others hold of the model is of no use alone, but they can be given another split of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlxcel_nb.client.exits import Exits
from mlxcel_nb.client.report import LoadReport
from mlxcel_nb.client.router import Router
from mlxcel_nb.errors import ClusterError, EngineLost, MlxcelError, PeerLost
from mlxcel_nb.launch.local import EngineInfo
from mlxcel_nb.launch.process import is_ending

GOODBYE_S = 1.0
"""How long the first error of a node waits for the news that its process has ended, to say so, while that process is
whole: one that is about to end says goodbye first."""

ENDING_S = 15.0
"""The same once its end has begun: it may have gigabytes to give back, on a machine that has no time for it."""

LOOK_S = 0.1
"""Between two looks at the process."""

_ANEW = "top the cluster and start it again."


def lost(router: Router, engines: Sequence[EngineInfo], exits: Exits) -> dict[str, str]:
    """Why each engine that is lost is so."""
    alive, ended = router.alive(), exits.known()
    dead = [engine.node_id for engine in engines if engine.node_id not in alive]
    return {node: ended.get(node) or router.state(node)[1] for node in dead}


def explain(
    error: MlxcelError, router: Router | None, engines: Sequence[EngineInfo], exits: Exits, *, loaded: bool = False
) -> MlxcelError:
    """A lost connection as the end of a process, when it was one.

    Args:
        loaded: a model is, so it has to be unloaded before there can be another split.
    """
    node = error.node
    if not isinstance(error, PeerLost) or node is None:
        return error
    description = _how_it_ended(node, engines, exits)
    left = sum(each != node for each in router.alive()) if router else 0
    advice = _advice(left, loaded=loaded)
    if description is None:
        return PeerLost(error.cause, node=node, advice=error.advice or advice)
    return EngineLost(description, node=node, advice=advice)


def _how_it_ended(node: str, engines: Sequence[EngineInfo], exits: Exits) -> str | None:
    """What the launcher tells of its process's end; None where it goes on. A link ends before the process has."""
    pid = next((engine.pid for engine in engines if engine.node_id == node), None)
    while (description := exits.wait_for(node, LOOK_S)) is None:
        patience = ENDING_S if pid is not None and is_ending(pid) else GOODBYE_S
        if exits.asked_for_s(node) > patience:
            break
    return description


def held(model: LoadReport, lost: dict[str, str], count: int) -> ClusterError:
    """Why nothing can be loaded beside `model`.

    Args:
        count: engines of the cluster, lost ones included.
    """
    members = {part.node_id for part in model.parts}
    gone = [f"{node} ({why})" for node, why in lost.items() if node in members]
    if not gone:
        return ClusterError(f"{model.model} is loaded", advice="Unload it first: %mlxcel unload, in Python unload().")
    cause = f"{model.model} is loaded, but has lost {', '.join(gone)}"
    return ClusterError(cause, advice=_advice(count - len(lost), loaded=True))


def none_left(problems: Sequence[str], lost: Mapping[str, str], router: Router) -> EngineLost:
    """Why no request can be answered any more, replica by replica."""
    causes = "; ".join(f"replica {number}: {why}" for number, why in enumerate(problems))
    left = sum(node not in lost for node in router.alive())
    return EngineLost(f"no replica of the model is left ({causes})", advice=_advice(left, loaded=True))


def _advice(left: int, *, loaded: bool) -> str:
    if not left:
        return f"S{_ANEW}"
    rest = "the engine that is left" if left == 1 else f"the {left} engines that are left"
    first = "Unload the model, then load it" if loaded else "Load the model"
    return f"{first} on {rest}, or s{_ANEW}"

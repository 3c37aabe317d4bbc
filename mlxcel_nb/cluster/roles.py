"""The roles a node can have, and the names people use for them. Pure; any thread.

A role says how a node takes part in a model: as one place of a mesh, in a group that only reads prompts or only makes
tokens, or as a whole by itself. The router holds no model; it is started from the command line and is in no file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from mlxcel_nb.errors import ConfigError

PREFILL = "prefill"
DECODE = "decode"
PIPELINE_STAGE = "pipeline_stage"
TENSOR_PARALLEL_RANK = "tensor_parallel_rank"
PIPELINE_TENSOR_PARALLEL = "pipeline_tensor_parallel"
HYBRID = "hybrid"
ROUTER = "router"

ROLES: Mapping[str, str] = {
    PREFILL: "reads prompts and hands their KV cache to a decode group",
    DECODE: "makes tokens from KV caches that prefill groups hand over",
    PIPELINE_STAGE: "holds the layers of one pipeline stage",
    TENSOR_PARALLEL_RANK: "holds its share of every layer",
    PIPELINE_TENSOR_PARALLEL: "holds its share of the layers of one stage",
    HYBRID: "does any work; holds a whole model where it serves alone",
}
"""What a cluster file may say, each with what it means."""

ALIASES: Mapping[str, str] = {
    "pipeline": PIPELINE_STAGE,
    "tensor_parallel": TENSOR_PARALLEL_RANK,
    "tp": TENSOR_PARALLEL_RANK,
    "pp_tp": PIPELINE_TENSOR_PARALLEL,
    "pptp": PIPELINE_TENSOR_PARALLEL,
    "2d": PIPELINE_TENSOR_PARALLEL,
}

MESH_ROLES = frozenset({PIPELINE_STAGE, TENSOR_PARALLEL_RANK, PIPELINE_TENSOR_PARALLEL})
"""Roles of nodes that together hold a model, one replica or several."""

GROUP_ROLES = frozenset({PREFILL, DECODE})
"""Roles whose nodes form groups, each of which holds a model."""

AUTO = "auto"
"""How keys and values travel from prefill to decode groups, where nobody says it: as is fastest, by measuring."""

PREFILL_FROM = 64
"""Tokens to be read from which on a prefill group reads them; so few take a step or two where they are answered."""

_NEAR = {"pp": "pipeline"}  # what the letters are nearest to is not what is meant


def parse_role(text: str, *, router: bool = False) -> str:
    """The role that `text` names, by its own name or an alias; case and hyphens do not matter.

    Args:
        router: whether `router` is among the answers: on a command line it is, in a cluster file it is not.

    Raises:
        ConfigError: no such role; the advice names the nearest.
    """
    wanted = text.strip().casefold().replace("-", "_")
    if wanted == ROUTER:
        if router:
            return ROUTER
        advice = "Leave it out of the file and start it by itself: mlxcel-nb node --node-role router"
        raise ConfigError("'router' belongs on a command line, not into a file", advice=advice)
    role = ALIASES.get(wanted, wanted)
    if role in ROLES:
        return role
    names = [*ROLES, *ALIASES, *([ROUTER] if router else [])]
    near = _NEAR.get(wanted) or next(iter(difflib.get_close_matches(wanted, names, n=1)), None)
    own_names = [*ROLES, *([ROUTER] if router else [])]
    advice = f"Perhaps {near}?" if near else f"Roles are {', '.join(own_names)}."
    raise ConfigError(f"{text[:64]!r} is not a role", advice=advice)


def fitting_role(tp: int, pp: int) -> str:
    """The role of the nodes of a mesh of `pp` stages by `tp` ranks."""
    if tp > 1:
        return PIPELINE_TENSOR_PARALLEL if pp > 1 else TENSOR_PARALLEL_RANK
    return PIPELINE_STAGE if pp > 1 else HYBRID

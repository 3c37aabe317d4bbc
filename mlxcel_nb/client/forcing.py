"""A request that is fed given tokens, and what every member saw of it: brought over the data plane, piece by piece.

For the thread that called `Cluster.forced`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxcel_nb.client.report import LoadReport
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.errors import StepTimeout, WireError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.verifying.recording import K
from mlxcel_nb.runtime.protocol import GenerateOrder, field

PAUSE_S = 0.02
"""Between two questions to a member that is not done: the leader's end may arrive here before it does there."""


@dataclass(frozen=True)
class Forced:
    """What the members saw.

    Args:
        logits: those that each token is told from, (tokens, V), float32.
        layers: by node id and layer, sketches of its output at every position, (positions, K).
    """

    logits: np.ndarray
    layers: Mapping[str, Mapping[int, np.ndarray]]


def order(instance: str, prompt: Sequence[int], tokens: Sequence[int]) -> GenerateOrder:
    """The request that feeds `tokens` after `prompt`, both ids."""
    params = SamplingParams(max_tokens=len(tokens), ignore_eos=True)
    return GenerateOrder(
        id=new_id(), instance=instance, params=params, token_ids=list(prompt), forced=list(tokens), rank=0
    )


def bring(router: Router, model: LoadReport, request: str, tokens: int, within_s: float) -> Forced:
    """Ask each member for what it noted of `request`.

    Raises:
        MlxcelError: a member that is lost or has noted nothing. StepTimeout: one that does not come to its end.
    """
    deadline = time.monotonic() + within_s
    end = max(part.layers[1] for part in model.parts)
    sampler = next(part.node_id for part in model.parts if part.rank == 0 and part.layers[1] == end)
    rows = [_ask(router, sampler, request, "logits", index, deadline) for index in range(tokens)]
    layers = {}
    for part in model.parts:
        told = {n: _ask(router, part.node_id, request, "layer", n, deadline) for n in range(*part.layers)}
        layers[part.node_id] = {n: sketch.reshape(-1, K) for n, sketch in told.items() if sketch.size}
    if {row.size for row in rows} != {rows[0].size if rows else 0}:
        raise WireError("its logits are not of one length", node=sampler)
    return Forced(np.stack(rows), layers)


def joined(first: Forced, rest: Forced) -> Forced:
    """What members saw who read a prompt, and then those who went on."""
    layers = {}
    for reader, theirs in first.layers.items():
        for answerer, others in rest.layers.items():
            both = {n: np.concatenate([theirs[n], others[n]]) for n in theirs.keys() & others.keys()}
            layers[f"{reader}, then {answerer}"] = both
    return Forced(np.concatenate([first.logits, rest.logits]), layers)


def _ask(router: Router, node: str, request: str, what: str, index: int, deadline: float) -> np.ndarray:
    while True:
        question = {"type": "recorded", "request": request, "what": what, "index": index}
        piece = router.ask(node, question).get("recorded")
        if piece is not None:
            break
        if time.monotonic() > deadline:
            raise StepTimeout("did not come to the end of the request", node=node)
        time.sleep(PAUSE_S)
    data: bytes = field({"type": "reply", "recorded": piece}, "recorded", bytes)
    if len(data) % (4 * K if what == "layer" else 4):
        raise WireError(f"a piece of {len(data)} bytes", node=node)
    return np.frombuffer(data, np.float32)

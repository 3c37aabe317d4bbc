"""Memory and time of one layout, node by node. Pure.

Bytes of weights and caches are counted. Activations are an estimate from above: what the products of the widest layer
make of a chunk, all at once, and the scores of its attention as if they were written out, which fused kernels avoid.

Times are estimates of a simple model, and are called that wherever they are shown:

* a step of decoding reads each weight that it needs once, and the caches: bytes / memory bandwidth;
* reading a prompt computes: products / speed, or the bytes again where they take longer, chunk by chunk, several
  stages at work on different chunks;
* an all-reduce of r ranks is one exchange with everybody, or a ring, whichever is shorter; expert-parallel ranks send a
  token to every other rank and get the outputs of its experts back, of which each rank has its share; ranks that share
  the vocabulary add up what they look up, and send their logits to the one that samples;
* stages hand on their activations, and the last one a token, each at a link's latency and rate; where the layers run
  several times over, a step goes round all stages for each lap, from the last back to the first;
* every layer costs a fixed time a step besides, that of starting its small operations, and so does every exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mlxcel_nb.cluster.layout import LayerRange, Layout
from mlxcel_nb.cluster.shape import LinkShape
from mlxcel_nb.plan.capacity import LONGEST, longest
from mlxcel_nb.plan.facts import ModelFacts, RankFacts
from mlxcel_nb.plan.nodes import Node, Speed

PROCESS = 200_000_000
"""Bytes of an engine beside its part of a model: 95 to 110 MB measured on Linux, the rest for the allocator's slack."""

TOKEN_BYTES = 64
"""A sampled token's way back to the leader, and a step plan's way out: small frames."""


@dataclass(frozen=True)
class Load:
    """What is to fit: `sequences` at once, each of `context` tokens, of which `prompt` are read before one is made."""

    context: int
    sequences: int = 1
    prompt: int = 512


@dataclass(frozen=True)
class Links:
    """Between nodes of one host, and between hosts."""

    local: LinkShape
    network: LinkShape

    def between(self, one: Node, other: Node) -> LinkShape:
        return self.local if one.host == other.host else self.network

    def slowest(self, nodes: Sequence[Node]) -> LinkShape:
        """The link that a group waits for."""
        pairs = [self.between(one, other) for i, one in enumerate(nodes) for other in nodes[i + 1 :]]
        return max(pairs, key=lambda link: sent_s(link, 1 << 16), default=self.local)


IN_HOST = LinkShape(latency_s=45e-6, bytes_per_s=2e9)
"""Between processes of a host: all-reduces of 2 ranks from MLX arrays, over our encrypted links in shared memory, take
50 us with 8 KiB and 591 us with 1 MiB (docs/benchmarks.md, `python -m benchmarks collectives`), on one machine."""

EXCHANGE_S = 250e-6
"""What an exchange between ranks takes beside its link: Python, cipher and kernel with caches that the layer's weights
have just filled, and the wait for the slower rank. Both ranks of SmolLM2-135M as tp2, in float32 on two cores of an AMD
EPYC, are 280 to 340 us in each sum of a step of decoding; alone in a loop the same sum takes 50."""

ETHERNET = LinkShape(latency_s=200e-6, bytes_per_s=125e6)
"""Between hosts, where nothing else is said: a gigabit, and what a small message takes over a switch."""


def sent_s(link: LinkShape, count: float) -> float:
    """Seconds until `count` bytes have arrived."""
    return link.latency_s + (count / link.bytes_per_s if link.bytes_per_s else 0.0)


def summed_s(link: LinkShape, ranks: int, count: float) -> float:
    """Seconds of an all-reduce of `count` bytes: from each to each, or twice round a ring in pieces."""
    if ranks < 2:
        return 0.0
    direct = sent_s(link, (ranks - 1) * count)
    ring = 2 * (ranks - 1) * sent_s(link, count / ranks)
    return min(direct, ring)


def exchanged_s(link: LinkShape, layout: Layout, count: float) -> float:
    """Seconds of one of a layer's exchanges: a sum of tensor ranks, or `count` bytes for each other's experts."""
    if layout.width == 1:
        return 0.0
    return EXCHANGE_S + (sent_s(link, (layout.ep - 1) * count) if layout.ep > 1 else summed_s(link, layout.tp, count))


@dataclass(frozen=True)
class NodePlan:
    """One node's part, in bytes. `left` is negative where it does not fit."""

    node: Node
    stage: int
    rank: int
    layers: LayerRange
    weights: int
    kv_per_token: int
    cache: int
    activations: int
    left: int
    context: int
    """The longest sequences that fit, as many as are asked for."""
    sequences: int
    """How many fit, of the length asked for."""


@dataclass(frozen=True)
class Placement:
    """A layout on nodes: `nodes` by member, stage-major."""

    layout: Layout
    nodes: tuple[Node, ...]

    def stage(self, stage: int) -> tuple[Node, ...]:
        return self.nodes[stage * self.layout.width : (stage + 1) * self.layout.width]


@dataclass(frozen=True)
class Times:
    """Estimates in seconds: to the first token of the prompt, and for each later one of a single sequence."""

    first: float
    token: float
    sums: float
    """Of `token`, what ranks exchange: their all-reduces and logits, or the ways to experts and back."""


def makes_logits(facts: ModelFacts, stage: int, rank: int, n_stages: int) -> bool:
    """Whether a tensor rank runs the model to its end: the one that samples, or all that share the vocabulary."""
    return stage == n_stages - 1 and (rank == 0 or facts.vocab_parallel)


def activations(facts: ModelFacts, rank: RankFacts, layers: LayerRange, tp: int, load: Load, *, head: bool) -> int:
    """Bytes that reading a chunk takes for a moment, beside weights and caches."""
    held = rank.layers[slice(*layers)]
    count = min(facts.chunk, load.context)
    kept = [growth for layer in held for growth in layer.cache if growth.per_token]
    looked = max((_looked_at(growth.most, load.context) for growth in kept), default=0)
    scores = -(-facts.heads // tp) * facts.itemsize * looked
    inner = max((layer.inner for layer in held), default=0)
    return count * (4 * facts.width + inner + scores) + (2 * facts.vocab * 4 if head else 0)


def _looked_at(most: int | None, context: int) -> int:
    return context if most is None else min(most, context)


def node_plan(facts: ModelFacts, placement: Placement, member: int, load: Load) -> NodePlan:
    """What one member takes of its node."""
    layout = placement.layout
    stage, number = layout.stage_of(member), layout.rank_of(member)
    rank, layers, node = facts.of(layout)[number], layout.stages[stage], placement.nodes[member]
    weights = rank.weights(layers, stage, layout.pp)
    held = rank.layers[slice(*layers)]
    head = layout.ep > 1 or makes_logits(facts, stage, number, layout.pp)
    sequences = -(-load.sequences // layout.ep)

    def cache(tokens: int) -> int:
        return sum(layer.cache_at(tokens) for layer in held)

    def room(tokens: int) -> int:
        """Left for caches of sequences of `tokens` tokens."""
        asked = Load(tokens, sequences, load.prompt)
        return node.memory - PROCESS - weights - activations(facts, rank, layers, layout.tp, asked, head=head)

    each = cache(load.context)
    return NodePlan(
        node=node,
        stage=stage,
        rank=number,
        layers=layers,
        weights=weights,
        kv_per_token=sum(layer.kv_per_token for layer in held),
        cache=each * sequences,
        activations=activations(facts, rank, layers, layout.tp, load, head=head),
        left=room(load.context) - each * sequences,
        context=longest(lambda tokens: room(tokens) >= sequences * cache(tokens), facts.context or LONGEST),
        sequences=_many(room(load.context), each),
    )


def _many(room: int, each: int) -> int:
    return 0 if room < 0 else room // each if each else LONGEST


def stage_s(
    facts: ModelFacts, placement: Placement, stage: int, layers: LayerRange, speeds: Sequence[Speed], load: Load
) -> float:
    """Seconds of one stage for one token, its all-reduces left out: those of the rank that takes longest."""
    layout = placement.layout
    slowest = 0.0
    for number, rank in enumerate(facts.of(layout)):
        speed = speeds[stage * layout.width + number]
        read = sum(layer.active + layer.cache_at(load.context) for layer in rank.layers[slice(*layers)])
        read += rank.head if stage == layout.pp - 1 else 0
        slowest = max(slowest, read / speed.bandwidth + facts.laps * (layers[1] - layers[0]) * speed.per_layer)
    return slowest


def _chunk_s(
    facts: ModelFacts, placement: Placement, stage: int, speeds: Sequence[Speed], links: Links, count: int, before: int
) -> float:
    """Seconds of one stage for a chunk of `count` tokens that come after `before` others, all its laps together; the
    head left out.
    """
    layout = placement.layout
    layers = layout.stages[stage]
    nodes = placement.stage(stage)
    slowest = summing = 0.0
    for number, rank in enumerate(facts.of(layout)):
        held, speed = rank.layers[slice(*layers)], speeds[stage * layout.width + number]
        products = 2.0 * count * sum(layer.products for layer in held)
        # Each token against each before it: for scores and for what they weigh, a product with all that is cached.
        looked = sum(
            growth.group * growth.per_token * _looked_at(growth.most, before + count // 2)
            for layer in held
            for growth in layer.cache
        )
        products += 2.0 * count * looked / facts.itemsize
        read = facts.laps * sum(layer.weights for layer in held)
        took = max(products / speed.flops, read / speed.bandwidth) + facts.laps * len(held) * speed.per_layer
        slowest = max(slowest, took)
    link = links.slowest(nodes)
    for layer in facts.of(layout)[0].layers[slice(*layers)]:
        summing += sum(exchanged_s(link, layout, count * each) for each in layer.sums)
    return slowest + summing


def times(facts: ModelFacts, placement: Placement, speeds: Sequence[Speed], links: Links, load: Load) -> Times:
    """What a user would wait for, by the model that this module's head tells.

    Args:
        speeds: of each member.
    """
    layout = placement.layout
    token = sums = 0.0
    for stage, layers in enumerate(layout.stages):
        token += stage_s(facts, placement, stage, layers, speeds, load)
        link = links.slowest(placement.stage(stage))
        for layer in facts.of(layout)[0].layers[slice(*layers)]:
            sums += sum(exchanged_s(link, layout, each) for each in layer.sums)
    gathered = _gathered_s(facts, placement, links)
    sums += gathered
    token += sums + _handed_on(facts, placement, links, 1) + _returned(placement, links)

    chunks = [(start, min(facts.chunk, load.prompt - start)) for start in range(0, load.prompt, facts.chunk)]
    ready = [0.0] * layout.pp  # when each stage is done with the chunk before
    for start, count in chunks:
        arrived = 0.0
        took = [_chunk_s(facts, placement, stage, speeds, links, count, start) for stage in range(layout.pp)]
        for _, stage in itertools.product(range(facts.laps), range(layout.pp)):  # all laps of one before the next
            begun = max(arrived, ready[stage])
            ready[stage] = begun + took[stage] / facts.laps
            arrived = ready[stage] + _hop_s(placement, links, stage, count * facts.width)
    sampler = facts.of(layout)[0].head / speeds[layout.sampler].bandwidth
    first = ready[-1] + sampler + gathered + _returned(placement, links)
    return Times(first=first, token=token, sums=sums)


def _gathered_s(facts: ModelFacts, placement: Placement, links: Links) -> float:
    """Seconds until the rank that samples has the logits of those that share the vocabulary with it."""
    layout = placement.layout
    if layout.tp == 1 or not facts.vocab_parallel:
        return 0.0
    theirs = facts.vocab * facts.itemsize * (layout.tp - 1) / layout.tp
    return EXCHANGE_S + sent_s(links.slowest(placement.stage(layout.pp - 1)), theirs)


def _hop_s(placement: Placement, links: Links, stage: int, count: float) -> float:
    """Seconds of handing `count` bytes to the next stage, or from the last to the first: the slowest rank counts."""
    if placement.layout.pp == 1:
        return 0.0
    pairs = zip(placement.stage(stage), placement.stage((stage + 1) % placement.layout.pp), strict=True)
    return max(sent_s(links.between(one, other), count) for one, other in pairs)


def _handed_on(facts: ModelFacts, placement: Placement, links: Links, tokens: int) -> float:
    """From stage to stage, once a lap; from the last to the first between two laps."""
    *onward, back = (_hop_s(placement, links, stage, tokens * facts.width) for stage in range(placement.layout.pp))
    return facts.laps * sum(onward) + (facts.laps - 1) * back


def _returned(placement: Placement, links: Links) -> float:
    """A sampled token's way to the member that leads."""
    if placement.layout.ep > 1:  # whoever holds the sequence
        return sent_s(links.slowest(placement.nodes), TOKEN_BYTES)
    leader, sampler = placement.nodes[0], placement.nodes[placement.layout.sampler]
    return 0.0 if placement.layout.pp == 1 else sent_s(links.between(leader, sampler), TOKEN_BYTES)

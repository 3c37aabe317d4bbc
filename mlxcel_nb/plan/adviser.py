"""Which layouts there are for a model and some nodes, which of them fit, and which one to take and why. Pure.

The rules of the strategy: one node that is enough needs no split; ranks belong on one host, or on links fast enough
for their sums; stages go across hosts, and onto nodes that differ; of what is left the fastest by the estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlxcel_nb.cluster.layout import LayerRange, Layout, Sizes, check_alone, split_evenly
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.apart import ANSWER, apart
from mlxcel_nb.plan.capacity import LONGEST
from mlxcel_nb.plan.estimate import PROCESS, Links, Load, NodePlan, Placement, Times, node_plan, times
from mlxcel_nb.plan.experts import dense
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.nodes import Node, Speed, alike
from mlxcel_nb.plan.stages import StageCosts, split_layers
from mlxcel_nb.util.units import bytes_text, figure

MUCH_FASTER = 1.25
"""An estimate is rough; a layout is called faster from here on."""


@dataclass(frozen=True)
class Judged:
    """A legal layout: what it takes of each node, how far it goes, and how fast it is by the estimate.

    Args:
        why_not: which node it does not fit and by how much; "" where it fits.
    """

    placement: Placement
    parts: tuple[NodePlan, ...]
    times: Times
    why_not: str

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    @property
    def context(self) -> int:
        """Longest sequences: those of the node with least room."""
        return min(part.context for part in self.parts)

    @property
    def sequences(self) -> int:
        """Sequences of the length asked for that fit at once: those of the node with least room; of expert-parallel
        ranks, which hold some each, those of all together.
        """
        each = [part.sequences for part in self.parts]
        return min(sum(each), LONGEST) if self.layout.ep > 1 else min(each)

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.times.token


@dataclass(frozen=True)
class Given:
    """A layout that somebody has laid down, as in a cluster file.

    Args:
        nodes: by member, stage-major.
        stages: layers by hand; None where they are to be shared as is best.
        ep: expert-parallel ranks, in place of the others.
    """

    tp: int
    pp: int
    nodes: tuple[Node, ...]
    stages: tuple[LayerRange, ...] | None = None
    ep: int = 1


@dataclass(frozen=True)
class Advice:
    """What there is to say.

    Args:
        given: the layout that was laid down; None where none was, or where it cannot be.
        given_refused: why it cannot be.
        refused: layouts that cannot be, by name, and why.
        best: None where nothing fits.
        why: reasons, a sentence each.
        by: what uneven layers went by: "speed" or "memory".
    """

    judged: tuple[Judged, ...]
    refused: tuple[tuple[str, str], ...]
    best: Judged | None
    why: tuple[str, ...]
    by: str
    given: Judged | None = None
    given_refused: str = ""

    @property
    def good(self) -> bool:
        """Whether something fits, and what was laid down does."""
        given_fits = self.given is None or not self.given.why_not
        return self.best is not None and given_fits and not self.given_refused


def advise(
    facts: ModelFacts, nodes: Sequence[Node], load: Load, links: Links, usual: Speed | None, given: Given | None = None
) -> Advice:
    """Look at every layout of up to as many members as there are nodes, and at the one that was laid down.

    Args:
        usual: the speed of nodes whose own is not known; None where all are.
    """
    known = all(node.bandwidth for node in nodes)
    judged, refused = [], []
    for tp in range(1, len(nodes) + 1):
        if tp in facts.refused:
            refused.append((f"tp{tp}", str(facts.refused[tp])))
            continue
        for pp in range(1, len(nodes) // tp + 1):
            problem = facts.unstaged if pp > 1 else ""
            if pp > facts.n_layers:
                problem = f"{pp} stages for {facts.n_layers} layers"
            if problem:
                refused.append((_range(tp, pp, len(nodes) // tp), problem))
                break
            judged.append(_judge(facts, _choose(nodes, tp, pp), Sizes(tp, pp), load, links, usual, known=known))
    for ep in range(2, len(nodes) + 1):
        if ep in facts.spread:
            judged.append(_judge(facts, _choose(nodes, ep, 1), Sizes(ep=ep), load, links, usual, known=known))
        elif ep in facts.unspread:
            refused.append((f"ep{ep}", str(facts.unspread[ep])))
    if facts.spread:
        refused += _not_together(len(nodes))
    own, cannot = None, ""
    if given is not None:
        cannot = _cannot(facts, given)
    if given is not None and not cannot:
        own = _judge(
            facts,
            given.nodes,
            Sizes(given.tp, given.pp, given.ep),
            load,
            links,
            usual,
            known=known,
            stages=given.stages,
        )
        judged = [own, *(each for each in judged if each.placement != own.placement)]
    best = _best(judged)
    why = _why(facts, best, judged, nodes, load, links) if best else _why_none(facts, judged, load)
    by = "speed" if known else "memory"
    return Advice(tuple(judged), tuple(refused), best, tuple(why), by, own, cannot)


def _not_together(members: int) -> Iterator[tuple[str, str]]:
    """Splits that expert-parallel ranks do not go with, where there are nodes for them; the smallest of each."""
    for sizes in (Sizes(tp=2, ep=2), Sizes(pp=2, ep=2)):
        if sizes.members <= members:
            try:
                check_alone(sizes)
            except ConfigError as error:
                yield f"{Layout(split_evenly(sizes.pp, sizes.pp), sizes.tp, sizes.ep).name} and more", str(error)


def _cannot(facts: ModelFacts, given: Given) -> str:
    """Why a layout that was laid down is none for this model; "" where it is one."""
    if given.tp in facts.refused:
        return str(facts.refused[given.tp])
    if given.ep > 1 and given.ep not in facts.spread:
        return str(facts.unspread.get(given.ep) or dense(facts.model_type, given.ep))
    if given.pp > 1 and facts.unstaged:
        return facts.unstaged
    if given.pp > facts.n_layers:
        return f"{given.pp} stages for {facts.n_layers} layers"
    if given.stages is not None and given.stages[-1][1] != facts.n_layers:
        return f"its layers end at {given.stages[-1][1] - 1}, and the model's last layer is {facts.n_layers - 1}"
    return ""


def _range(tp: int, first: int, last: int) -> str:
    """`pp2 to pp4`, `tp2xpp2`."""
    names = [Layout(split_evenly(pp, pp), tp).name for pp in (first, last)]
    return names[0] if first == last else " to ".join(names)


def _choose(nodes: Sequence[Node], tp: int, pp: int) -> tuple[Node, ...]:
    """The roomiest nodes, ranks of a stage on one host where there are hosts enough; in the order they were given."""
    place = {node.name: index for index, node in enumerate(nodes)}
    hosts: dict[str, list[Node]] = {}
    for node in nodes:
        hosts.setdefault(node.host, []).append(node)
    groups, rest = [], []
    for found in hosts.values():
        mates = sorted(found, key=lambda node: (-node.memory, -(node.bandwidth or 0), place[node.name]))
        whole = len(mates) // tp * tp
        groups += [mates[i : i + tp] for i in range(0, whole, tp)]
        rest += mates[whole:]
    rest.sort(key=lambda node: (-node.memory, -(node.bandwidth or 0), place[node.name]))
    mixed = [rest[i : i + tp] for i in range(0, len(rest) // tp * tp, tp)]

    def worth(group: Sequence[Node]) -> tuple[float, float]:
        return min(node.memory for node in group), min(node.bandwidth or 0 for node in group)

    # Python's sort keeps the order of equals: groups on one host come before those across hosts.
    chosen = sorted([*groups, *mixed], key=worth, reverse=True)[:pp]
    ordered = sorted(
        (sorted(group, key=lambda node: place[node.name]) for group in chosen), key=lambda g: place[g[0].name]
    )
    return tuple(node for group in ordered for node in group)


def _judge(
    facts: ModelFacts,
    nodes: tuple[Node, ...],
    sizes: Sizes,
    load: Load,
    links: Links,
    usual: Speed | None,
    *,
    known: bool,
    stages: tuple[LayerRange, ...] | None = None,
) -> Judged:
    speeds = [node.speed(usual) for node in nodes]
    tp, pp, ep = sizes
    if stages is None and pp == 1:
        stages = split_evenly(facts.n_layers, pp)
    if stages is None:
        costs = StageCosts(facts, nodes, speeds, tp, pp, load)
        chosen = split_layers(facts.n_layers, pp, costs.time) if known else None
        chosen = chosen or split_layers(facts.n_layers, pp, costs.memory)
        assert chosen is not None  # shares of memory are finite, and there are layers enough
        stages = chosen
    placement = Placement(Layout(stages, tp, ep), nodes)
    parts = tuple(node_plan(facts, placement, member, load) for member in range(sizes.members))
    return Judged(placement, parts, times(facts, placement, speeds, links, load), _why_not(parts, load))


def _why_not(parts: Sequence[NodePlan], load: Load) -> str:
    short = [part for part in parts if part.left < 0]
    if not short:
        return ""
    worst = min(short, key=lambda part: part.left)
    needs = bytes_text(worst.node.memory - worst.left)
    what = f"{worst.node.name} would need {needs} of its {bytes_text(worst.node.memory)}"
    longest = min(part.context for part in parts)
    if longest:
        return f"{what}; {_sequences(load)} of up to {longest} tokens would fit"
    if worst.weights >= worst.node.memory:
        return f"{what}: its weights alone take {bytes_text(worst.weights)}"
    return (
        f"{what}: {bytes_text(worst.weights)} of weights, {bytes_text(PROCESS)} for the process, the rest to work with"
    )


def _sequences(load: Load) -> str:
    return "a sequence" if load.sequences == 1 else f"{load.sequences} sequences"


def _best(judged: Sequence[Judged]) -> Judged | None:
    fitting = [each for each in judged if not each.why_not]
    single = next((each for each in fitting if each.layout.size == 1), None)
    if single is not None:
        return single
    # Of layouts that are about as fast, the one that needs fewer nodes.
    fastest = min((each.times.token for each in fitting), default=0.0)
    near = [each for each in fitting if each.times.token <= 1.05 * fastest]
    return min(near, key=lambda each: (each.layout.size, each.times.token), default=None)


def _why(
    facts: ModelFacts, best: Judged, judged: Sequence[Judged], nodes: Sequence[Node], load: Load, links: Links
) -> list[str]:
    layout, why = best.layout, []
    whole = bytes_text(facts.weights)
    fitting = [each for each in judged if not each.why_not]
    if layout.size == 1:
        why.append(f"One node is enough for {whole} of weights, and what is not split waits for no link.")
        fast = max(fitting, key=lambda each: each.tokens_per_s)
        if fast.tokens_per_s > MUCH_FASTER * best.tokens_per_s:
            factor = figure(fast.tokens_per_s / best.tokens_per_s)
            why.append(f"{fast.layout.name} is estimated at {factor} times its tokens a second.")
    else:
        single = next((each for each in judged if each.layout.size == 1), None)
        if single is not None:
            why.append(f"One node is not enough: {single.why_not}.")
        why += _why_split(best, judged, nodes, links)
    if (groups := apart(best.times, load, _copies(best, nodes))) is not None:
        why.append(
            f"A prompt takes {groups.read_s:.1f} s to be read, while others get tokens at half the pace. --prefill "
            f"{groups.prefill} --decode {groups.decode} ends that, for {groups.share:.0%} of the requests a second "
            f"that these nodes would answer as replicas, with answers of {ANSWER} tokens."
        )
    return why


def _copies(best: Judged, nodes: Sequence[Node]) -> int:
    """How many groups of nodes can each have the model like `best`; one, where not every node has room for any part."""
    most = max(part.node.memory - part.left for part in best.parts)
    return len(nodes) // best.layout.size if all(node.memory >= most for node in nodes) else 1


def _why_split(best: Judged, judged: Sequence[Judged], nodes: Sequence[Node], links: Links) -> list[str]:
    layout, why = best.layout, []
    stages = [best.placement.stage(stage) for stage in range(layout.pp)]
    one_host = all(len({node.host for node in stage}) == 1 for stage in stages)
    if layout.tp > 1:
        share = best.times.sums / best.times.token
        where = "within a host" if one_host else f"over a link of {links.slowest(stages[0]).words}"
        why.append(f"Ranks share the work of every layer {where}: their sums take {share:.0%} of a step.")
    if layout.ep > 1:
        share = best.times.sums / best.times.token
        where = "within a host" if one_host else f"over a link of {links.slowest(stages[0]).words}"
        why.append(
            f"Each rank has some experts and the rest for the requests that it holds: tokens go to experts {where}, "
            f"which takes {share:.0%} of a step."
        )
    if layout.pp > 1 and layout.tp > 1:
        why.append("Stages hand on one activation a token, so they go across what is slow.")
    if layout.pp > 1 and layout.tp == 1:
        wide = [each for each in judged if each.layout.tp > 1 and not each.why_not]
        if wide:
            other = min(wide, key=lambda each: each.times.token)
            why.append(
                f"Stages hand on one activation a token; the sums of {other.layout.name} would take "
                f"{other.times.sums * 1e3:.1f} ms of each."
            )
        if not alike(nodes):
            why.append("The nodes differ: stages take uneven layers, ranks would all wait for the smallest.")
    return why


def _why_none(facts: ModelFacts, judged: Sequence[Judged], load: Load) -> list[str]:
    longest = max(judged, key=lambda each: (each.context, -max(-part.left for part in each.parts)), default=None)
    if longest is None:
        return ["No layout is legal on these nodes."]
    if longest.context:
        what = f"Nothing fits {_sequences(load)} of {load.context} tokens."
        most = max(each.sequences for each in judged)
        fewer = f", or a --concurrency of {most}" if most else ""
        return [
            f"{what} {longest.layout.name} goes furthest: {longest.context} tokens.",
            f"Plan with a --context of that{fewer}, or with more or larger nodes.",
        ]
    bits = "" if facts.quantised else ", or fewer bits a weight: --bits 4 plans that"
    return [
        f"Nothing fits. {longest.layout.name} comes closest: {longest.why_not}.",
        f"It takes more or larger nodes{bits}.",
    ]

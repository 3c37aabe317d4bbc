"""What `plan` says: layouts and their bytes node by node, and the words around them. Pure: from advice to a `View`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from mlxcel_nb.cluster.config_model import NodeEntry
from mlxcel_nb.cluster.layout import Layout, split_evenly
from mlxcel_nb.display.reports import layers_text
from mlxcel_nb.display.view import Column, View, stack, table
from mlxcel_nb.plan.adviser import Advice, Judged
from mlxcel_nb.plan.capacity import LONGEST
from mlxcel_nb.plan.estimate import Links, Load, NodePlan
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.nodes import Node, Speed
from mlxcel_nb.util.units import bytes_text, figure

TAKEN, FITS, DOES_NOT = "▸", "○", "✕"


def plan_view(
    facts: ModelFacts,
    load: Load,
    advice: Advice,
    assumed: Sequence[str],
    mesh: str = "",
    places: View | None = None,
    dtype: str = "",
) -> View:
    """Two tables, layouts and nodes, and what to do.

    Args:
        mesh: of a cluster file, where the nodes are one.
        places: those nodes as the file has them.
        dtype: what `load` must be told of it; "" where it does by itself what is planned.
    """
    columns = [Column(""), Column("layout"), Column("layers")]
    columns += [Column(name, number=True) for name in ("longest context", "at once", "first token", "tokens/s")]
    columns.append(Column("why not"))
    rows = [_layout_row(each, advice) for each in advice.judged]
    title = f"{mesh}: " if mesh else ""
    title += f"{facts.name}: {facts.model_type}, {facts.n_layers} layers, {bytes_text(facts.weights)} of weights as "
    title += facts.quantised or facts.dtype
    several = f"{load.sequences} sequences" if load.sequences > 1 else "a sequence"
    notes = [
        f"For {several} of {load.context} tokens, {load.prompt} of them a prompt. Times are estimates.",
        *assumed,
        *([_shared(advice)] if _uneven(advice) else []),
        *facts.notes,
    ]
    layouts = table(title, columns, rows, notes)
    refused = table("Layouts that cannot be", [Column("layout"), Column("why")], advice.refused)
    best = advice.best
    head = f"Take {best.layout.name}{_how(best, facts, dtype)}" if best else "No layout fits"
    verdict = table(head, [], [], advice.why)
    views = [layouts, _bytes_view(advice)]
    views += [refused] if advice.refused else []
    if words := _given_words(advice):
        verdict = table(head, [], [], [words, *advice.why])
    return stack(*([places] if places else []), *views, verdict)


def places_view(source: str, entries: Sequence[NodeEntry], nodes: Sequence[Node]) -> View:
    """Nodes of a cluster file: what they are there, and what they are planned with."""
    columns = [Column("node"), Column("role"), Column("group"), Column("stage", number=True)]
    columns += [Column("rank", number=True), Column("layers"), Column("memory", number=True)]
    rows: list[list[object]] = [
        [e.id, e.role, e.group, e.stage, e.rank, layers_text(e.layers), bytes_text(node.memory)]
        for e, node in zip(entries, nodes, strict=True)
    ]
    return table(f"Nodes of {source}", columns, rows)


def _given_words(advice: Advice) -> str:
    """Whether what a cluster file lays down can be."""
    if advice.given_refused:
        return f"The file's own layout cannot be: {advice.given_refused.rstrip('.')}."
    if advice.given is None:
        return ""
    name = advice.given.layout.name
    why_not = advice.given.why_not
    return f"The file's own layout, {name}, {f'does not fit: {why_not}' if why_not else 'fits'}."


def _uneven(advice: Advice) -> bool:
    """Whether some layout's stages are not those that `load` makes by itself."""
    return any(_by_hand(each.layout) for each in advice.judged)


def _by_hand(layout: Layout) -> str:
    """The layers as `load` must be told them; "" where --pp alone gives the same."""
    if layout.stages == split_evenly(layout.stages[-1][1], layout.pp):
        return ""
    return f"--layers {','.join(str(layers_text(span)) for span in layout.stages)}"


def _shared(advice: Advice) -> str:
    what = f"Layers are shared by {advice.by}, within what fits"
    return f"{what}: load a layout with the --layers beside it, as --pp alone shares them evenly."


def _layout_row(each: Judged, advice: Advice) -> list[object]:
    mark = TAKEN if each is advice.best else DOES_NOT if each.why_not else FITS
    layers = ", ".join(str(layers_text(span)) for span in each.layout.stages) if each.layout.pp > 1 else None
    layers = _by_hand(each.layout) or layers
    fits = not each.why_not
    return [
        mark,
        f"{each.layout.name}, the file's" if each is advice.given else each.layout.name,
        layers,
        _many(each.context),
        _many(each.sequences),
        _seconds(each.times.first) if fits else None,
        figure(each.tokens_per_s) if fits else None,
        each.why_not or None,
    ]


def _bytes_view(advice: Advice) -> View:
    columns = [Column("layout"), Column("node"), Column("layers")]
    columns += [Column(n, number=True) for n in ("weights", "KV a token", "caches", "activations", "headroom")]
    rows: list[list[object]] = []
    for each in advice.judged:
        for index, (parts, names) in enumerate(_alike(each.parts)):
            part = parts[0]
            left = bytes_text(abs(part.left))
            rows.append(
                [
                    each.layout.name if index == 0 else "",
                    names,
                    layers_text(part.layers),
                    bytes_text(part.weights),
                    bytes_text(part.kv_per_token),
                    bytes_text(part.cache),
                    bytes_text(part.activations),
                    left if part.left >= 0 else f"{left} short",
                ]
            )
    return table("Bytes on each node", columns, rows)


def _alike(parts: Sequence[NodePlan]) -> Iterator[tuple[list[NodePlan], str]]:
    """Neighbours with the same figures share a line."""
    for _, group in itertools.groupby(parts, lambda p: (p.layers, p.weights, p.cache, p.activations, p.left)):
        same = list(group)
        names = [part.node.name for part in same]
        yield same, ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]}"


def _how(best: Judged, facts: ModelFacts, dtype: str) -> str:
    words = load_words(best.layout, facts, dtype)
    if best.layout.size > 1:
        return f": load with {words}"
    return f" on {best.placement.nodes[0].name}: nothing split" + (f", load with {words}" if words else "")


def load_words(layout: Layout, facts: ModelFacts, dtype: str) -> str:
    """What `load` is told to do what is planned, beside the model."""
    words = [f"--{kind} {n}" for kind, n in (("tp", layout.tp), ("pp", layout.pp), ("ep", layout.ep)) if n > 1]
    shared = "--vocab-parallel" if facts.vocab_parallel and layout.tp > 1 else ""
    return " ".join(filter(None, [*words, shared, _by_hand(layout), f"--dtype {dtype}" if dtype else ""]))


def _many(count: int) -> str | None:
    return "any" if count >= LONGEST else str(count) if count else None


def _seconds(seconds: float) -> str:
    return f"{figure(seconds)} s" if seconds >= 1 else f"{figure(seconds * 1e3)} ms"


def plan_dict(
    facts: ModelFacts,
    nodes: Sequence[Node],
    load: Load,
    links: Links,
    usual: Speed | None,
    advice: Advice,
    assumed: Sequence[str],
    mesh: str = "",
    dtype: str = "",
) -> dict[str, Any]:
    """The same for other programs: bytes, seconds, tokens; layer ranges half-open."""
    return {
        "mesh": mesh or None,
        "model": facts.name,
        "model_type": facts.model_type,
        "layers": facts.n_layers,
        "weights_bytes": facts.weights,
        "dtype": facts.dtype,
        "quantised": facts.quantised or None,
        "max_context": facts.context or None,
        "vocab_parallel": facts.vocab_parallel,
        "asked": {"context": load.context, "concurrency": load.sequences, "prompt": load.prompt},
        "nodes": [
            {"name": n.name, "host": n.host, "memory_bytes": n.memory, "bandwidth": n.speed(usual).bandwidth,
             "flops": n.speed(usual).flops, "speed_given": n.bandwidth is not None}
            for n in nodes
        ],
        "link": {"latency_s": links.network.latency_s, "bytes_per_s": links.network.bytes_per_s},
        "link_in_host": {"latency_s": links.local.latency_s, "bytes_per_s": links.local.bytes_per_s},
        "layouts": [
            _judged_dict(each, each is advice.best)
            | {"load_with": load_words(each.layout, facts, dtype), "given": each is advice.given}
            for each in advice.judged
        ],
        "given_refused": advice.given_refused or None,
        "refused": [{"layout": name, "why": why} for name, why in advice.refused],
        "recommended": advice.best.layout.name if advice.best else None,
        "why": list(advice.why),
        "assumed": list(assumed),
        "times": "estimates",
    }  # fmt: skip


def _judged_dict(each: Judged, recommended: bool) -> dict[str, Any]:
    return {
        "layout": each.layout.name,
        "tp": each.layout.tp,
        "ep": each.layout.ep,
        "stages": [list(span) for span in each.layout.stages],
        "fits": not each.why_not,
        "why_not": each.why_not or None,
        "recommended": recommended,
        "max_context": each.context,
        "max_concurrency": each.sequences,
        "first_token_s": each.times.first,
        "tokens_per_s": each.tokens_per_s,
        "parts": [
            {"node": p.node.name, "stage": p.stage, "rank": p.rank, "layers": list(p.layers),
             "weights_bytes": p.weights, "kv_bytes_per_token": p.kv_per_token, "cache_bytes": p.cache,
             "activation_bytes": p.activations, "headroom_bytes": p.left, "max_context": p.context,
             "max_concurrency": p.sequences}
            for p in each.parts
        ],
    }  # fmt: skip

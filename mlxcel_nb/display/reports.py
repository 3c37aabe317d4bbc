"""What the client reports, as tables. Pure: from `client.report` dataclasses to `view.View`s."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcel_nb.client.report import (
    ClusterStatus,
    Completion,
    LinkReport,
    LoadReport,
    NodeReport,
    PartReport,
    ReplicaReport,
)
from mlxcel_nb.cluster.collectives import OWN, marked
from mlxcel_nb.cluster.paths import SAME_HOST
from mlxcel_nb.cluster.roles import HYBRID
from mlxcel_nb.display.view import RUN_MIME, Column, State, View, note, stack, table
from mlxcel_nb.display.work import engines_view, node_rows
from mlxcel_nb.plan.capacity import LONGEST
from mlxcel_nb.util.units import bytes_text, ms_text


def status_view(status: ClusterStatus) -> View:
    """Who holds what, over which links, and how fast the last answer was."""
    model = status.model
    held = {part.node_id: part for part in model.parts} if model else {}
    columns = [
        Column("node"),
        Column("state"),
        Column("role"),
        Column("layers"),
        Column("weights", number=True),
        *(Column(name, number=True) for name in ROOM),
        Column("BLAS"),
        Column("threads", number=True),
        Column("pid", number=True),
        Column("address"),
    ]
    rows: list[list[object]] = []
    for node in status.nodes:
        part = held.get(node.node_id) if node.state != "dead" else None
        rows.append(
            [
                node.node_id,
                State(node.state, node.reason),
                _role(node, part),
                layers_text(node.layers),
                bytes_text(part.resident_bytes) if part else None,
                *_kv(part),
                node.blas or None,
                node.threads or None,
                node.pid or None,
                node.address or None,
            ]
        )
    title = f"Cluster {status.name}"
    if model:
        title += f": {model.model}, {model.layout}, {model.dtype}{_sums(model)}"
    notes = room_lines(model) if model else ["No model is loaded. Load one: %mlxcel load smollm2-135m --pp 2"]
    if all(replica.problem for replica in status.replicas):
        notes += [f"The model no longer works: {why}" for why in _losses(status)]
    views = [table(title, columns, rows, [*notes, *(f"Note: {w}" for w in status.warnings)])]
    if len(status.replicas) > 1:
        views.append(_replicas(status.replicas))
    if engines := [each for each in status.engines if each.requests > 1]:  # the first one is load's own
        views.append(engines_view(engines))
    if status.differing:
        columns = [Column("library"), Column("version"), Column("nodes")]
        differing = [[each.library, each.version, ", ".join(each.nodes)] for each in status.differing]
        views.append(table("Versions that differ", columns, differing))
    if status.links:
        views.append(_links(status.links))
    if status.last:
        views.append(note(f"Last answer: {status.last.figures}"))
    return stack(*views)


def _replicas(replicas: Sequence[ReplicaReport]) -> View:
    """The copies of the model, and what each has to do."""
    columns = [Column("replica", number=True), Column("state"), Column("nodes"), Column("requests", number=True)]
    rows = [
        [
            each.number,
            State("dead", each.problem) if each.problem else State("alive"),
            ", ".join(each.nodes),
            None if each.problem else each.requests,
        ]
        for each in replicas
    ]
    return table("Replicas", columns, rows)


def _losses(status: ClusterStatus) -> list[str]:
    """Why the model no longer works: what one node says of each lost one, as others say the same in other words."""
    ids = {node.node_id for node in status.nodes}
    found: dict[str, str] = {}
    for why in (node.error for node in status.nodes if node.error):
        whose = why.partition(": ")[0]
        found.setdefault(whose if whose in ids else why, why)
    return list(found.values())


def node_view(status: ClusterStatus, node_id: str) -> View:
    """All there is to say of one node, and its links."""
    node = next(node for node in status.nodes if node.node_id == node_id)
    parts = status.model.parts if status.model and node.state != "dead" else ()
    part = next((part for part in parts if part.node_id == node_id), None)
    rows: list[list[object]] = [
        ["state", State(node.state, node.reason)],
        ["role", _role(node, part)],
        ["layers", layers_text(node.layers)],
        ["weights", f"{bytes_text(part.resident_bytes)}, planned {bytes_text(part.planned_bytes)}" if part else None],
        ["keys and values", _kv_words(part, status.model)],
        ["partial sums", marked(node.collectives) if node.collectives else None],
        ["activity", node.activity or None],
        *node_rows(node, status.engines),
        ["error", node.error or None],
        ["address", node.address or None],
        ["host", node.host or None],
        ["platform", node.platform or None],
        ["memory of the process", bytes_text(node.memory_bytes or None)],
        ["of that, arrays", bytes_text(node.arrays_bytes or None)],
        ["free on its host", bytes_text(node.free_bytes or None)],
        ["computes on", node.device.upper() or None],
        ["pid", node.pid or None],
        ["BLAS", node.blas or None],
        ["threads", node.threads or None],
        ["links at best", _at_best(node)],
        *_versions(node),
    ]
    shown = [row for row in rows if row[1] is not None]
    return stack(
        table("", [Column("node"), Column(node_id)], shown),
        _links([link for link in status.links if node_id in {link.source, link.target}]),
    )


def _links(links: Sequence[LinkReport]) -> View:
    columns = [Column("from"), Column("to"), Column("path"), Column("cipher"), Column("round trip", number=True)]
    rows = [[x.source, x.target, _path(x), cipher_text(x.cipher), ms_text(x.rtt_s)] for x in links]
    reasons = [f"{x.source} to {x.target}: {x.path}: {x.why}" for x in links if x.why and x.why != SAME_HOST]
    return table("Links", columns, rows, reasons if rows else ["none"])


def _path(link: LinkReport) -> str:
    """What a link is and which way it takes; a shaped one its shape, as its loopback stands for another link."""
    if link.shape:
        return f"{link.transport}, shaped {link.shape}"
    return f"{link.transport} over {link.path}" if link.path else link.transport


def _at_best(node: NodeReport) -> str | None:
    """What the host's links can be, and what would make them better."""
    if not node.surroundings:
        return None
    told = node.surroundings
    return " ".join([f"{told.get('transport')}: {told.get('reason')}.", *map(str, told.get("advice") or ())])


def load_view(report: LoadReport) -> View:
    """Who holds which layers of a freshly loaded model."""
    columns = [Column("node"), Column("stage", number=True), Column("rank", number=True), Column("layers")]
    if report.readers:
        columns.insert(1, Column("group"))
    elif report.replicas > 1:
        columns.insert(1, Column("replica", number=True))
    columns += [Column(name, number=True) for name in ("weights", *ROOM)]
    rows = [
        [
            part.node_id,
            *([f"{part.role} {part.replica}"] if report.readers else [part.replica] if report.replicas > 1 else []),
            part.stage,
            part.rank,
            layers_text(part.layers),
            bytes_text(part.resident_bytes),
            *_kv(part),
        ]
        for part in report.parts
    ]
    title = f"{report.model} is ready after {report.load_s:.1f} s: {report.layout}, {report.dtype}{_sums(report)}"
    notes = [*room_lines(report), *(f"Note: {warning}" for warning in report.warnings)]
    return table(title, columns, rows, notes)


ROOM = ("KV a token", "longest request", "at once")
"""Columns of `_kv`."""


def _kv(part: PartReport | None) -> list[object]:
    if part is None or part.kv_tokens is None:
        return [None, None, None]
    return [bytes_text(part.kv_per_token), str(part.kv_tokens), _many(part.requests)]


def _kv_words(part: PartReport | None, model: LoadReport | None) -> str | None:
    """What `_kv` says, of one node."""
    if part is None or model is None or part.kv_tokens is None:
        return None
    a_token, tokens, requests = _kv(part)
    return f"{a_token} a token; a request of {tokens} tokens at most, or {requests} at once of {model.request_tokens}"


def _many(count: int | None) -> str | None:
    return "any" if count is not None and count >= LONGEST else None if count is None else str(count)


def room_lines(report: LoadReport) -> list[str]:
    """What there is room for, and how stages are kept at work, in a line each."""
    return [*_room(report), *_pipeline(report), *_reading(report)]


def _room(report: LoadReport) -> list[str]:
    """For how long a request, and for how many, there is room on every node, and what ends it where memory does not."""
    if report.kv_tokens is None or report.requests is None:
        return []
    tokens = f"{report.kv_tokens} tokens"
    if report.memory_tokens is not None and report.memory_tokens > report.kv_tokens:
        more = " and more" if report.memory_tokens >= LONGEST else ""
        tokens += f" (the model's context; memory has room for {report.memory_tokens}{more})"
    several = f"{_many(report.requests)} at once of {report.request_tokens}"
    if report.layout.rpartition("x")[2].startswith("ep") and report.replicas == 1:
        return [f"Room for a request of {tokens} on every node, or for {several} on all together."]
    if report.replicas > 1:
        return [f"Room for a request of {tokens} on every replica, or for {several} on all {report.replicas} together."]
    return [f"Room for a request of {tokens}, or {several}, by the node with least."]


def _pipeline(report: LoadReport) -> list[str]:
    """How stages are kept at work, and how long each waits all the same."""
    if report.stages == 1:
        return []
    groups = f"{report.micro_batches} micro-batch{'' if report.micro_batches == 1 else 'es'}"
    waits = f"a stage waits at least {report.bubble:.0%} of its time (GPipe's bubble, (S-1)/(S-1+M))"
    return [f"{groups} in {report.stages} stages: {waits}."]


def _reading(report: LoadReport) -> list[str]:
    """Who reads prompts for whom, and how what was read travels."""
    if not report.readers:
        return []
    readers = "1 prefill group reads" if report.readers == 1 else f"{report.readers} prefill groups read"
    answerers = "the decode group" if report.replicas == 1 else f"{report.replicas} decode groups"
    return [f"{readers} prompts for {answerers}; keys and values travel {report.transfer}."]


def _sums(report: LoadReport) -> str:
    """Who adds partial sums up, where that is not we; and whether ranks share the vocabulary."""
    sums = "" if report.collectives == OWN else f", {marked(report.collectives)}"
    return f"{sums}, vocabulary shared" if report.vocab_parallel else sums


def footer(completion: Completion) -> View:
    """One quiet line under an answer, with the metrics, and no word of its text, for other programs."""
    view = note(completion.figures)
    data = completion.to_dict()
    return View(view.text, view.html, {RUN_MIME: {k: v for k, v in data.items() if k not in _WORDS}})


_WORDS = frozenset({"text", "tokens", "stop_reason"})


def layers_text(layers: tuple[int, int] | None) -> str | None:
    """Half-open layers as a user types them: (0, 15) is 0-14."""
    if layers is None:
        return None
    first, end = layers
    return f"{first}-{end - 1}" if end > first else "none"


def cipher_text(suite: str) -> str:
    """A suite's option value under the cipher's usual name."""
    return {"aes-256-gcm": "AES-256-GCM", "chacha20-poly1305": "ChaCha20-Poly1305"}.get(suite, suite)


def _role(node: NodeReport, part: PartReport | None) -> str | None:
    if node.stage is None:
        return node.activity or None
    kind = "replica" if part is None or part.role == HYBRID else part.role
    replica = "" if part is None or part.replica is None else f"{kind} {part.replica}, "
    return f"{replica}stage {node.stage}" + (f", rank {node.rank}" if node.rank is not None else "")


def _versions(node: NodeReport) -> list[list[object]]:
    return [[f"version of {name}", version] for name, version in sorted(node.versions.items())]

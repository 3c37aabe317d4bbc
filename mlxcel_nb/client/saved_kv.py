"""Keys and values of what a model has read, saved to a file and loaded again, whatever the split then and now.

They come from every member's kept blocks, and go to every member of the new layout, over the data plane, piece by
piece: nowhere more than a few blocks wait. For the thread that called `Cluster.save_kv` or `load_kv`; nodes and files
are not trusted, and what they say is checked.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as field_
from pathlib import Path
from typing import Any

from mlxcel_nb.client.report import LoadReport
from mlxcel_nb.client.router import Router
from mlxcel_nb.errors import ConfigError, MlxcelError, ModelError, RequestError, StepTimeout, WireError
from mlxcel_nb.models.digest import folder_sha256
from mlxcel_nb.models.folder import read_json
from mlxcel_nb.models.kv_file import BOTH, DTYPES, KvHeader, KvLayer, KvReader, KvWriter, path_of, saved
from mlxcel_nb.plan.kv_shares import Shares, lots, read_shares, sources, targets
from mlxcel_nb.plan.shards import Range
from mlxcel_nb.runtime.protocol import LoadOrder, field
from mlxcel_nb.scheduling.step_plan import BLOCK
from mlxcel_nb.util import times

PIECE = 1 << 20
"""Bytes of a question or an answer, about: the loops at both ends stay prompt."""

AT_ONCE = 16 << 20
"""Bytes that a member is sent before it is told to keep them; at least one block."""

PAUSE_S = 0.02
"""Between two questions to a member that has not come so far."""

Told = Callable[[int, int], None]
"""Takes tokens done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class KvReport:
    """What was saved or loaded.

    Args:
        tokens: of the sequence that are saved, or that are kept now by the engines.
        saved_tokens: in the file.
        layout: of the model now; `saved_layout` is the one they were computed in.
        messages: the turns of a conversation that were saved with them.
    """

    name: str
    path: Path
    model: str
    tokens: int
    saved_tokens: int
    nbytes: int
    layout: str
    saved_layout: str
    seconds: float
    messages: tuple[dict[str, str], ...] = field_(default=(), repr=False)


class Members:
    """The members of one instance, asked one at a time."""

    def __init__(self, router: Router, order: LoadOrder) -> None:
        self._router = router
        self._order = order
        self._within_s = order.step_s + times.DEAD_S
        self.transfer = secrets.randbelow(1 << 52)
        self.leader = order.members[0].node_id
        self.shares: dict[str, Shares] = {}
        self.homes: dict[str, int] = {}

    def ask(self, node: str, what: str, **more: Any) -> Any:
        """One question; None is an answer too.

        Raises:
            MlxcelError: what the node answered, or that it is lost.
        """
        return self._router.ask(node, self._question(what, **more), timeout=self._within_s).get("kv")

    def _question(self, what: str, **more: Any) -> dict[str, Any]:
        return {"type": "kv", "what": what, "instance": self._order.instance, "transfer": self.transfer, **more}

    def until(self, node: str, what: str, **more: Any) -> Any:
        """Ask until the answer is not None: the member, or the request, has come so far.

        Raises:
            StepTimeout: it does not.
        """
        deadline = time.monotonic() + self._within_s
        while (told := self.ask(node, what, **more)) is None:
            if time.monotonic() > deadline:
                raise StepTimeout("does not come to what was to be saved", node=node)
            if what in ("get", "ran"):  # the leader knows whether there is anything to wait for
                self.ask(self.leader, {"get": "hold"}.get(what, what), **more)
            time.sleep(PAUSE_S)
        return told

    def look(self) -> None:
        """Learn what each keeps.

        Raises:
            RequestError: a model whose keys and values cannot be saved, and why.
        """
        for member in self._order.members:
            told = _map(self.ask(member.node_id, "parts"), member.node_id)
            self.homes[member.node_id] = field(told, "home", int)
            self.shares[member.node_id] = read_shares(told.get("shares"))
        if len({len(each) for each in self.shares.values()}) > 1:
            raise WireError("members count their layers differently")

    def of_home(self, home: int) -> dict[str, Shares]:
        """Those that hold the sequences of a home."""
        return {node: shares for node, shares in self.shares.items() if self.homes[node] == home}

    def done(self) -> None:
        """Nothing more is wanted of this transfer. Nodes that are lost hold nothing."""
        for member in self._order.members:
            with contextlib.suppress(MlxcelError):
                self._router.ask(member.node_id, self._question("done"))


def _map(told: Any, node: str) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise WireError("an answer about keys and values cannot be read", node=node)
    return told


# ---------------------------------------------------------------------------------------------------------- save


def save(
    router: Router,
    order: LoadOrder,
    report: LoadReport,
    name: str,
    request: str,
    *,
    messages: Sequence[Mapping[str, str]] = (),
    on_progress: Told | None = None,
) -> KvReport:
    """Write what the members of `order` have kept of a request that is over.

    Args:
        messages: turns to save with it.

    Raises:
        ConfigError: the name. ModelError: no room on the disk. MlxcelError: a member, or what it says.
    """
    began, path = time.monotonic(), path_of(name)
    members = Members(router, order)
    members.look()
    try:
        found = _map(members.until(members.leader, "find", request=request), members.leader)
        tokens = _ids(found.get("tokens"))
        blocks, epoch = field(found, "blocks", list), field(found, "epoch", int)
        if len(tokens) != BLOCK * len(blocks) or not blocks:
            raise WireError("blocks and tokens do not agree", node=members.leader)
        home = members.of_home(field(found, "home", int))
        shapes = {node: members.until(node, "shapes", epoch=epoch, block=blocks[0]) for node in home}
        dtype, layers = _layers(home, shapes)
        if dtype != report.dtype:
            raise RequestError(f"what this model keeps cannot be saved: {dtype} where it computes in {report.dtype}")
        header = KvHeader(
            model=report.model,
            model_sha256=folder_sha256(report.path),
            architecture=str(read_json(Path(report.path) / "config.json").get("model_type", "")),
            dtype=dtype,
            layout=report.layout,
            tokens=len(tokens),
            layers=layers,
            created=time.time(),
            messages=tuple(dict(each) for each in messages),
        )
        with KvWriter(path, header, tokens) as writer:
            _gather(members, home, header, blocks, epoch, writer, on_progress)
            writer.finish()
    finally:
        members.done()
    return _report(name, path, header, len(tokens), report, time.monotonic() - began)


def _layers(home: Mapping[str, Shares], shapes: Mapping[str, Any]) -> tuple[str, tuple[KvLayer | None, ...]]:
    """The type and sizes of what the members keep, of the whole model.

    Raises:
        WireError: they contradict each other.
    """
    dtypes = set()
    found: list[KvLayer | None] = [None] * len(next(iter(home.values())))
    for node, shares in home.items():
        told = _map(shapes[node], node)
        kept = field(told, "layers", list)
        if len(kept) != len(found):
            raise WireError("blocks of another number of layers", node=node)
        for index, (sizes, share) in enumerate(zip(kept, shares, strict=True)):
            if sizes is None:
                continue
            if share is None or not isinstance(sizes, list) or [type(each) for each in sizes] != [int] * 3:
                raise WireError(f"what it keeps of layer {index} cannot be read", node=node)
            layer = KvLayer(share.total(sizes[0]), sizes[1], sizes[2])
            if found[index] not in (None, layer):
                raise WireError(f"members keep layer {index} differently", node=node)
            found[index] = layer
        if any(kept):
            dtypes.add(field(told, "dtype", str))
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise RequestError(f"what this model keeps cannot be saved: it is {', '.join(sorted(dtypes)) or 'nothing'}")
    return dtypes.pop(), tuple(found)


def _gather(
    members: Members,
    home: Mapping[str, Shares],
    header: KvHeader,
    blocks: Sequence[int],
    epoch: int,
    writer: KvWriter,
    on_progress: Told | None,
) -> None:
    """Bring every block of every member, each head once."""
    wanted = {node: _pieces(header, places) for node, places in sources(home, _totals(header)).items()}
    for at, block in enumerate(blocks):
        span = (at * BLOCK, (at + 1) * BLOCK)
        members.ask(members.leader, "hold")
        for node, pieces in wanted.items():
            for lot in lots([(piece, piece.nbytes) for piece in pieces], PIECE):
                asked = [[piece.cache, piece.which] for piece in lot]
                told = members.until(node, "get", epoch=epoch, block=block, pieces=asked)
                if not isinstance(told, list) or [len(x) if isinstance(x, bytes) else -1 for x in told] != [
                    piece.nbytes for piece in lot
                ]:
                    raise WireError("pieces of another size than was asked for", node=node)
                for piece, data in zip(lot, told, strict=True):
                    writer.write(piece.cache, BOTH[piece.which], piece.heads, span, data)
        if on_progress is not None:
            on_progress(span[1], header.tokens)


@dataclass(frozen=True)
class _Piece:
    """Keys (0) or values (1) of some heads of a cache, of one block."""

    cache: int
    which: int
    heads: Range
    dim: int
    nbytes: int


def _pieces(header: KvHeader, places: Sequence[tuple[int, Range]]) -> list[_Piece]:
    found = []
    for cache, heads in places:
        layer = header.layers[cache]
        assert layer is not None
        for which, name in enumerate(BOTH):
            dim = layer.dim(name)
            nbytes = (heads[1] - heads[0]) * BLOCK * dim * DTYPES[header.dtype][1]
            found.append(_Piece(cache, which, heads, dim, nbytes))
    return found


def _totals(header: KvHeader) -> list[int | None]:
    return [each and each.heads for each in header.layers]


# ---------------------------------------------------------------------------------------------------------- load


def load(
    router: Router, orders: Sequence[LoadOrder], report: LoadReport, name: str, *, on_progress: Told | None = None
) -> KvReport:
    """Have the members of every replica keep what is in a file.

    Raises:
        ConfigError: the name, or of another model or type. ModelError: the file. MlxcelError: a member.
    """
    began, path = time.monotonic(), saved(name)
    with KvReader(path) as reader:
        header = reader.header
        _check(name, header, report)
        kept = min(_spread(router, order, reader, on_progress) for order in orders)
        return _report(name, path, header, kept, report, time.monotonic() - began)


def _check(name: str, header: KvHeader, report: LoadReport) -> None:
    """Refuse what was computed by another model, or in another type: it would mean nothing here."""
    own = folder_sha256(report.path)
    if header.model_sha256 != own:
        raise ConfigError(
            f"{name} was saved of {header.model} (sha256 {header.model_sha256[:12]}), "
            f"and {report.model} (sha256 {own[:12]}) is loaded",
            advice=f"Load {header.model} first.",
        )
    if header.dtype != report.dtype:
        raise ConfigError(
            f"{name} was saved in {header.dtype}, and the model computes in {report.dtype}",
            advice=f"Load it with dtype {header.dtype}.",
        )


def _spread(router: Router, order: LoadOrder, reader: KvReader, on_progress: Told | None) -> int:
    """Send every member of one instance its share, a few blocks at a time; tokens that are kept then."""
    header, tokens = reader.header, reader.tokens()
    members = Members(router, order)
    members.look()
    whole = len(tokens) // BLOCK
    known = _map(members.ask(members.leader, "known", tokens=_packed(tokens)), members.leader)
    number, kept = field(known, "home", int), field(known, "kept", int)
    home = members.of_home(number)
    if not home:
        raise WireError(f"there is no home {number}", node=members.leader)
    wanted = {node: _pieces(header, targets(shares, _totals(header))) for node, shares in home.items()}
    largest = max(sum(piece.nbytes for piece in pieces) for pieces in wanted.values())
    step = max(1, AT_ONCE // max(1, largest))
    try:
        while kept < whole:
            end = min(kept + step, whole)
            for node, pieces in wanted.items():
                for index in range(kept, end):
                    _put(members, node, reader, index, pieces)
            told = _map(
                members.ask(members.leader, "adopt", tokens=_packed(tokens[: end * BLOCK]), begin=kept, home=number),
                members.leader,
            )
            if (step := field(told, "step", int)) >= 0:
                for node in home:
                    members.until(node, "ran", epoch=field(told, "epoch", int), step=step)
            if (now := field(told, "kept", int)) < end:
                return min(now, whole) * BLOCK  # there is room for no more
            kept = now
            if on_progress is not None:
                on_progress(kept * BLOCK, header.tokens)
    finally:
        members.done()
    return min(kept, whole) * BLOCK


def _put(members: Members, node: str, reader: KvReader, index: int, pieces: Sequence[_Piece]) -> None:
    """Send a member its pieces of one block."""
    span = (index * BLOCK, (index + 1) * BLOCK)
    for lot in lots([(piece, piece.nbytes) for piece in pieces], PIECE):
        told = [
            [p.cache, p.which, p.heads[1] - p.heads[0], p.dim, reader.read(p.cache, BOTH[p.which], p.heads, span)]
            for p in lot
        ]
        members.ask(node, "put", index=index, dtype=reader.header.dtype, pieces=told)


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _ids(told: Any) -> list[int]:
    if not isinstance(told, bytes) or len(told) % 4:
        raise WireError("token ids that cannot be read")
    return list(struct.unpack(f"<{len(told) // 4}I", told))


def _report(name: str, path: Path, header: KvHeader, tokens: int, report: LoadReport, seconds: float) -> KvReport:
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    return KvReport(
        name=name,
        path=path,
        model=header.model,
        tokens=tokens,
        saved_tokens=header.tokens,
        nbytes=nbytes,
        layout=report.layout,
        saved_layout=header.layout,
        seconds=seconds,
        messages=header.messages,
    )

"""MLX's own groups (`ring`, `jaccl`, `nccl`) for the sums of a stage. For the MLX thread alone.

They are unencrypted and authenticate nobody; a user asks for them. MLX forms a group from the environment, once in the
life of a process, and holds the interpreter while it does: what can go wrong is found out before, over our own links,
whose other ends are known. A collective of MLX's cannot be interrupted, so all ranks vote on each step before it runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from mlxcel_nb import errors
from mlxcel_nb.cluster.collectives import (
    BACKENDS,
    DEVICES,
    INSTEAD,
    RESTART,
    Word,
    devices_trouble,
    dials,
    host_file,
    keeps,
    settings,
)
from mlxcel_nb.errors import Cancelled, ClusterError, ConfigError, MlxcelError, NodeFailed, PeerAborted, PeerLost
from mlxcel_nb.net.links.addresses import normal_ip
from mlxcel_nb.runtime.fabric import Fabric
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.runtime.status import backends
from mlxcel_nb.runtime.stuck import Inside
from mlxcel_nb.util.log import get_logger
from mlxcel_nb.wire.messages import pack, unpack

log = get_logger("runtime.mlx_groups")

TRIAL_S = 2.0
"""For a connection to the address that MLX is going to dial."""

FORM_S = 20.0
"""MLX tries to connect for 15 s. A process that is still at it then ends: it can do nothing else any more."""

FIRST_S = 0.1
"""The last rank of a ring dials first, and MLX waits a whole second where nobody listens yet."""

GO = b"go"
"""The vote to run a step; any other is an error."""

BLAME_S = 2.0
"""To find out which rank is gone, after MLX has said that one is."""


@dataclass
class Formed:
    """The group that this process is in; `broken` says why it is of no use any more."""

    id: str
    backend: str
    rank: int
    size: int
    group: Any
    broken: str = ""

    def check(self, node: str) -> None:
        """Raise if it is broken."""
        if self.broken:
            raise ClusterError(f"MLX's {self.backend} is broken: {self.broken}", node=node, advice=RESTART)


_formed: Formed | None = None


class MlxCollectives:
    """Sums by `formed`, within MLX's evaluation of a whole step.

    Nobody can leave a step that others have gone into, so every rank votes once on each: to go, or not and why. It
    goes in if all go. Having voted it heeds no cancel and no abort until the step is over, since others may have its
    vote already; the loss of a member it does heed, for that ends the group anyway.
    """

    breakable = False

    def __init__(self, formed: Formed, fabric: Fabric, inside: Inside, node: str, nodes: Sequence[str]) -> None:
        self._formed = formed
        self._fabric = fabric
        self._inside = inside
        self._node = node
        self._nodes = nodes

    def all_reduce(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self._formed.group)

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        """All ranks get all columns: MLX has no other gather, and wants the same shape of each."""
        padded = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, max(widths) - x.shape[-1])])
        every = mx.distributed.all_gather(padded[None], group=self._formed.group)
        return mx.concatenate([every[rank, ..., :width] for rank, width in enumerate(widths)], axis=-1)

    def run(self, build: Callable[[], mx.array], *, lazy: bool = False) -> mx.array:  # noqa: ARG002  # its sums are, anyway
        """`build` makes the step's graph, and may fail on one rank alone; what it makes is evaluated on all or on none.

        Raises:
            PeerLost: a rank's process has ended, within the step too. ClusterError: the group is broken.
            MlxcelError: another rank has left the step.
        """
        try:
            self._formed.check(self._node)
            y = build()
        except Exception as error:
            self.decline(errors.wrap(error, self._node))
            raise
        with self._inside.at(f"MLX's {self._formed.backend}"):
            self._agree()
            try:
                mx.eval(y)
            except BaseException as error:  # whatever it was, the ranks are no longer at the same point
                self._formed.broken = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise self._blame() from error
        return y

    def decline(self, error: MlxcelError) -> None:
        words = {rank: _no(error, in_full=link is self._fabric.leader) for rank, link in self._fabric.ranks.items()}
        with contextlib.suppress(MlxcelError):  # a rank that is lost needs no vote
            self._fabric.tell_ranks(words, self._inside.lost)

    def _agree(self) -> None:
        """Vote to go, and hear the others."""
        refused = None
        try:
            tag = self._fabric.tell_ranks(dict.fromkeys(self._fabric.ranks, GO), self._inside.lost)
            for rank, vote in self._fabric.hear_ranks(tag, self._inside.lost):
                if vote != GO:
                    refused = _why(vote, self._nodes[rank])
                    break
        except MlxcelError as error:  # somebody may have gone in
            self._formed.broken = error.cause
            raise
        if refused is not None:
            raise refused

    def _blame(self) -> MlxcelError:
        """Who is gone, as our own links have it."""
        try:
            self._fabric.gather(patience_s=BLAME_S)
        except PeerLost as lost:
            return lost
        except MlxcelError as error:
            log.info("who broke the group is not known: %s", error)
        return NodeFailed(f"MLX's {self._formed.backend}: {self._formed.broken}", node=self._node, advice=RESTART)


def _no(error: MlxcelError, *, in_full: bool) -> bytes:
    """A vote not to go. The leader hears why in full; others do not, for an error's words may quote a prompt."""
    left = isinstance(error, Cancelled | PeerAborted)
    told: MlxcelError = PeerAborted("left the step", node=error.node) if left or not in_full else error
    return pack(told.to_dict())


def _why(vote: bytes, node: str) -> MlxcelError:
    """What a vote not to go has as its reason."""
    told = unpack(vote)
    return errors.from_dict(told).at(node)


def join(order: LoadOrder, me: int, fabric: Fabric, inside: Inside) -> MlxCollectives:
    """The group of this member's stage: the one its process is in, or a new one.

    Raises:
        ConfigError: a rank cannot take part. ClusterError: a rank is in another group already, or none could be formed.
    """
    global _formed
    layout, backend = order.layout, BACKENDS[order.collectives]
    rank, node = layout.rank_of(me), order.members[me].node_id
    nodes = [order.members[me - rank + each].node_id for each in range(layout.tp)]
    with contextlib.ExitStack() as undo:
        reserved, trouble = _reserve(_host(order, me, fabric))
        if reserved is not None:
            undo.enter_context(reserved)
        if backend == "jaccl":
            trouble = trouble or devices_trouble(os.environ, _devices(os.environ), layout.tp)
        words = _tell(fabric, nodes, _word(node, reserved, trouble))
        if not keeps(words, order.collectives):
            assert reserved is not None
            addresses = [word.address for word in words]
            _try(fabric, nodes, node, dials(backend, rank, addresses))
            reserved.stop_listening()
            fabric.gather()
            _formed = Formed(words[0].proposal, backend, rank, layout.tp, _form(backend, rank, addresses, node))
            log.info("%s is rank %d of %d in MLX's %s, unencrypted", node, rank, layout.tp, backend)
    assert _formed is not None
    return MlxCollectives(_formed, fabric, inside, node, nodes)


def _word(node: str, reserved: Reserved | None, trouble: str) -> Word:
    formed = _formed
    mine: dict[str, Any] = {}
    if formed is not None:
        mine = {"group": formed.id, "backend": formed.backend, "rank": formed.rank, "size": formed.size}
        mine["broken"] = formed.broken
    return Word(
        node=node,
        available=tuple(backends()),
        address=reserved.address if reserved is not None else "",
        trouble=trouble,
        proposal=secrets.token_hex(8),
        **mine,
    )


def _tell(fabric: Fabric, nodes: Sequence[str], word: Word) -> list[Word]:
    """Every rank's word, in rank order."""
    said = fabric.gather(word.to_bytes())
    return [Word.from_bytes(each, node) for each, node in zip(said, nodes, strict=True)]


def _try(fabric: Fabric, nodes: Sequence[str], node: str, address: str) -> None:
    """Connect to where MLX is going to; all ranks hear whether all could.

    Raises:
        ConfigError: one could not.
    """
    reason = ""
    if address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=TRIAL_S).close()
        except OSError as error:
            reason = f"cannot reach {address}, where MLX's group would be: {error.strerror or error}"
    for word in _tell(fabric, nodes, Word(node=node, trouble=reason)):
        if word.trouble:
            raise ConfigError(word.trouble, node=word.node, advice=f"Open such ports between the hosts. {INSTEAD}")


def _form(backend: str, rank: int, addresses: Sequence[str], node: str) -> Any:
    """The group, formed by MLX from a private file and the environment, both as they were afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="mlxcel-group-"))  # mode 0700
    try:
        hosts = folder / "hosts.json"
        hosts.touch(0o600)
        hosts.write_text(host_file(addresses), "utf-8")
        with _environment(settings(backend, rank, addresses, str(hosts))), _deadline():
            if backend == "ring" and rank == len(addresses) - 1:
                time.sleep(FIRST_S)
            group = mx.distributed.init(strict=True, backend=backend)
    except RuntimeError as error:
        raise ClusterError(f"MLX could not form its {backend}: {error}", node=node, advice=RESTART) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if (group.rank(), group.size()) != (rank, len(addresses)):
        what = f"MLX was in a group of {group.size()} in this process before"
        raise ClusterError(what, node=node, advice=RESTART)
    return group


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    """End the process if what is within lasts too long: it may hold the interpreter, so no thread of ours could."""
    faulthandler.dump_traceback_later(FORM_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class Reserved:
    """A port of this host that MLX may bind, and nobody of another user meanwhile. It listens until told otherwise."""

    def __init__(self, host: str) -> None:
        with contextlib.ExitStack() as undo:
            self._listening = undo.enter_context(_bound(host, 0))
            self._listening.listen()
            port = self._listening.getsockname()[1]
            self._kept = undo.enter_context(_bound(host, port))
            undo.pop_all()
        self.address = f"{host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_listening()
        self._kept.close()

    def stop_listening(self) -> None:
        self._listening.close()


def _bound(host: str, port: int) -> socket.socket:
    """A TCP socket; MLX sets the same options, so it can bind what is bound here."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _reserve(host: str) -> tuple[Reserved | None, str]:
    """A port on `host`, or why there is none."""
    try:
        if not host or ":" in host:
            return None, f"MLX's groups speak IPv4 alone, and the links of this node are at {host or 'no address'}"
        return Reserved(host), ""
    except OSError as error:
        return None, f"no port for MLX's group on {host}: {error.strerror or error}"


def _host(order: LoadOrder, me: int, fabric: Fabric) -> str:
    """The address of this host on its link to the previous rank, which dials it in a ring."""
    tp, rank = order.layout.tp, order.layout.rank_of(me)
    name = fabric.links[me - rank + (rank - 1) % tp].link.sock.getsockname()
    if not isinstance(name, tuple):  # shaped: not the connection itself
        name = (order.members[me].address.rpartition(":")[0],)
    return normal_ip(str(name[0])).partition("%")[0]


def _devices(environ: Mapping[str, str]) -> str | None:
    try:
        return Path(environ[DEVICES]).read_text("utf-8")
    except (KeyError, OSError, UnicodeDecodeError):
        return None

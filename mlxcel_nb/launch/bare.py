"""A bare node: the runtime of an engine with no notebook above it, from `mlxcel-nb node` to a signal.

Called on a process's main thread, once. Everything that can be wrong (names, addresses, secrets, a port) is found
before anything listens, and said in one error; whatever had been started by then is stopped. Peers are trusted with
what `runtime.node` trusts them with.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import Change
from mlxcel_nb.cluster.roles import HYBRID
from mlxcel_nb.cluster.secret import Secrets, random_secret, resolve_secrets
from mlxcel_nb.cluster.shape import LinkPlan
from mlxcel_nb.errors import ConfigError, SecretError
from mlxcel_nb.launch.bare_plan import NodePlan, Whereabouts, hosts, judge
from mlxcel_nb.models.blas import load_fast_blas
from mlxcel_nb.net.interfaces.probe import own_addresses
from mlxcel_nb.net.links.addresses import is_numeric
from mlxcel_nb.net.links.resolver import lookup_all
from mlxcel_nb.util.hangups import HangUp

if TYPE_CHECKING:
    from mlxcel_nb.runtime.node import Node

LOOKUP_S = 10.0
"""For all names of a plan, looked up at once: above what a resolver takes to give up on one silent server."""

LOOK_S = 0.5
"""Between two looks for signals: one that the system gives to another thread does not wake the main one, and it does so
when two come at once."""


def secrets_of(plan: NodePlan, file: str | None, previous_file: str | None) -> Secrets:
    """The secrets of a node. One that is alone gets a random one that nobody knows: no file or variable is read.

    Args:
        file, previous_file: from the command line; they come before what the plan names.

    Raises:
        SecretError: there is none, or it cannot be used.
    """
    if plan.alone:
        return Secrets(random_secret())
    secrets = resolve_secrets(
        file=file,
        previous_file=previous_file,
        toml_file=plan.secret_file,
        toml_previous_file=plan.previous_secret_file,
    )
    if secrets is None:
        who = "a hybrid node with peers" if plan.role == HYBRID else f"a {plan.role} node"
        advice = "Use --secret-file, MLXCEL_CLUSTER_SECRET_FILE, or secret_file in the cluster file."
        raise SecretError(f"{who} needs the cluster secret, and none was given", node=plan.node_id, advice=advice)
    return secrets


def whereabouts(plan: NodePlan) -> Whereabouts:
    """Where the names of `plan` lead on this host. Blocks for `LOOKUP_S` at most; signals are handled meanwhile.

    Raises:
        ConfigError: as `judge`.
    """
    return judge(plan, lookup_all(hosts(plan), LOOKUP_S), own_addresses())


def run(
    plan: NodePlan,
    secrets: Secrets,
    places: Whereabouts,
    *,
    suite: str,
    threads: int,
    links: LinkPlan,
    back_end: str | None,
    renew: Callable[[Secrets], tuple[Secrets, str]],
    listening: Callable[[Address, str], str],
    changed: Callable[[Change], str | None],
    unseen: Callable[[str, str], str],
    say: Callable[[str], object],
) -> None:
    """Be the node until SIGINT or SIGTERM, or until its terminal is gone; on the main thread.

    Args:
        suite: cipher suite, as `wire.hello.SUITES` calls it.
        threads: cores for MLX.
        links: what links are made to be like.
        back_end: why MLX cannot compute here; None where it can.
        renew: what is good after a SIGHUP, for a node that holds these secrets, and the line about it.
        listening: the line for the address bound, and what multiplies matrices here.
        changed: the line for a peer's change of state, if it deserves one.
        unseen: the line for why a peer, of this id or address, was never reached.
        say: prints a line, on this thread.

    Raises:
        ConfigError: the port is taken, or the address cannot be bound. Nothing is left open.
    """
    blas = load_fast_blas(threads)  # before anything can import MLX
    from mlxcel_nb.runtime.node import Node
    from mlxcel_nb.runtime.node_config import NodeConfig

    lines: queue.SimpleQueue[str | _Signal] = queue.SimpleQueue()

    def tell(change: Change) -> None:
        if line := changed(change):
            lines.put(line)

    def miss(peer: str, reason: str) -> None:
        lines.put(unseen(peer, reason))

    config = NodeConfig(
        cluster=plan.cluster,
        node_id=plan.node_id,
        role=plan.role,
        bind=places.bind,
        port=plan.bind.port,
        port_range=None if plan.bind.port else plan.port_range,
        orphan_guard=False,
        threads=threads,
        blas=str(blas),
        links=links,
        suite=suite,
        transport=plan.transport,
        peers={node_id: [address] for node_id, address in plan.peers.items() if address.port},
        strangers=plan.strangers,
        sources=_sources(plan, places),
        discover=plan.beacons,
    )
    node = Node(config, secrets, on_change=tell, on_unseen=miss)
    with _signals(lines.put):
        try:
            say(listening(_started(node, plan), back_end or str(blas)))
            while (line := _next(lines)) is not _Signal.STOP:
                if line is _Signal.RENEW:
                    secrets, line = renew(secrets)
                    node.use_secrets(secrets)
                say(line)
        finally:
            node.stop()


def _next(lines: queue.SimpleQueue[str | _Signal]) -> str | _Signal:
    """What is to be said or done next."""
    while True:
        with contextlib.suppress(queue.Empty):
            return lines.get(timeout=LOOK_S)


def _started(node: Node, plan: NodePlan) -> Address:
    """Start it; a busy port is one of the cluster file's, where there is one."""
    try:
        return node.start()
    except ConfigError as error:
        if plan.entry is None or " in use" not in error.cause:
            raise
        advice = f"End that process, or give {plan.node_id} another port in {plan.source}, the same on every host."
        raise ConfigError(f"node {plan.node_id}: {error.cause}", advice=advice) from None


def _sources(plan: NodePlan, places: Whereabouts) -> Mapping[str, Collection[str]]:
    """Where each peer may come from: its name as well, which may lead elsewhere tomorrow, or is not known yet."""
    found: dict[str, set[str]] = {node_id: set(ips) for node_id, ips in places.sources.items()}
    for node_id, address in plan.peers.items():
        if not is_numeric(address.host) and not address.is_loopback:
            found.setdefault(node_id, set()).add(address.host)
    return found


class _Signal(enum.Enum):
    """What a signal asks of the node."""

    STOP = enum.auto()
    RENEW = enum.auto()


@contextlib.contextmanager
def _signals(tell: Callable[[_Signal], object]) -> Iterator[None]:
    """Tell of SIGINT, SIGTERM and SIGHUP, on the main thread, between any two of its instructions."""
    hang_up = HangUp(lambda: tell(_Signal.RENEW), lambda: tell(_Signal.STOP))
    before = {each: signal.signal(each, lambda *_: tell(_Signal.STOP)) for each in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    hang_up.catch_up()
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

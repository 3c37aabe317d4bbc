"""`net test`: how fast every node reaches every other."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.config import load_config
from mlxcel_nb.cluster.secret import Secrets, resolve_secrets
from mlxcel_nb.cluster.shape import LinkPlan, Shapes, parse_links
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.display.heatmap import mesh_view
from mlxcel_nb.display.view import View, note, stack
from mlxcel_nb.errors import ConfigError, SecretError, StepTimeout
from mlxcel_nb.net.discovery import beacons as discovery
from mlxcel_nb.net.measuring import all_pairs as nettest
from mlxcel_nb.net.measuring import pair as measuring
from mlxcel_nb.net.measuring.mesh import HERE, Mesh
from mlxcel_nb.util.loop import LoopThread

LISTEN_S = 5.0
"""For nodes whose ports only their beacons tell: two beacons each, and one that was lost."""

LOOK_S = 0.5
"""Between two looks at whether it has ended; an interrupt is noticed by then."""

REST_S = 60.0
"""For all that is not measuring: dialling, and hearing what interfaces there are."""


@dataclass(frozen=True)
class _Whom:
    """The cluster to be tested. `untold` are nodes whose addresses only beacons tell.

    `links` is how they were shaped, as far as we know, and `lost` says which nodes the cluster counts as lost, and why.
    """

    cluster: str
    secrets: Secrets
    nodes: Mapping[str, Sequence[Address]]
    untold: tuple[str, ...] = ()
    links: LinkPlan = field(default_factory=LinkPlan)
    lost: Callable[[], Mapping[str, str]] = dict

    @property
    def shapes(self) -> Shapes | None:
        """Of the links from here."""
        return self.links.seen_from(HERE)


def test(args: argparse.Namespace, context: Context) -> int:
    """Handler of `net test`; a notebook runs a loop already, so it gets one of its own."""
    if args.pings > measuring.MAX_PINGS or args.seconds > measuring.MAX_SECONDS:
        what = f"at most {measuring.MAX_PINGS} pings and {measuring.MAX_SECONDS:g} seconds are spent on a pair"
        raise UsageProblem(what, advice=args.see)
    whom = _from_file(args) if args.config is not None else _own(args, context)
    effort = nettest.Effort(pings=args.pings, seconds=args.seconds)
    loop = LoopThread("mlxcel-net-test")
    try:
        with context.console.progress(f"Measuring {whom.cluster}") as progress:
            testing = loop.spawn(_test(whom, args.suite, effort, progress.update))
            _wait(testing, REST_S + len(whom.nodes) ** 2 * effort.limit_s)
            mesh = _with_shapes(testing.result(), whom.links)
            if getattr(args, "json", False):
                line = json.dumps({"cluster": whom.cluster, **mesh.to_dict()})
                progress.finish(View(line, note(line).html))
            else:
                progress.finish(stack(mesh_view(mesh), *_lost(mesh, whom.lost())))
    finally:
        loop.close()
    return 1 if mesh.failed else 0


async def _test(whom: _Whom, suite: str, effort: nettest.Effort, update: Any) -> Mesh:
    nodes = dict(whom.nodes)
    if whom.untold:
        update(0, 0, f"listening for {', '.join(whom.untold)}")
        found = await discovery.discover(whom.cluster, whom.secrets, seconds=LISTEN_S)
        announced = {node.node_id: node.addresses for node in found.nodes}
        nodes = {node: nodes[node] or announced.get(node, ()) for node in nodes}
    return await nettest.measure_mesh(
        nodes, whom.cluster, whom.secrets, suite=suite, effort=effort, shapes=whom.shapes, on_progress=update
    )


def _wait(testing: concurrent.futures.Future[Mesh], within_s: float) -> None:
    """Wait for the end, in steps, so that an interrupt is noticed between them."""
    for _ in range(int(within_s / LOOK_S) + 1):
        if concurrent.futures.wait([testing], LOOK_S).done:
            return
    raise StepTimeout(f"the test did not end within {within_s:.0f} s")


def _own(args: argparse.Namespace, context: Context) -> _Whom:
    """This notebook's cluster."""
    if args.secret_file is not None or args.previous_secret_file is not None:
        raise UsageProblem("a secret file belongs to --config", advice="Without it, this notebook's cluster is tested.")
    cluster = context.session.get(args.cluster).cluster
    nodes = {node.node_id: [node.address] for node in cluster.nodes}
    links = parse_links(cluster.link, list(nodes))
    return _Whom(cluster.name, Secrets(cluster.secret), nodes, links=links, lost=lambda: cluster.lost)


def _with_shapes(mesh: Mesh, links: LinkPlan) -> Mesh:
    """Pairs whose links were shaped know how."""
    shapes = [links.between(pair.source, pair.target) for pair in mesh.pairs]
    told = (replace(pair, shape=shape.words) if shape else pair for pair, shape in zip(mesh.pairs, shapes, strict=True))
    return replace(mesh, pairs=tuple(told))


def _lost(mesh: Mesh, lost: Mapping[str, str]) -> list[View]:
    """A line for each node that was measured although the cluster has given it up: `status` calls it dead."""
    answered = {pair.target for pair in mesh.pairs if pair.measured}
    how = "Its process answers again, but this cluster does not take it back: stop it and start it again."
    return [note(f"{node} counts as lost: {why}. {how}") for node, why in lost.items() if node in answered]


def _from_file(args: argparse.Namespace) -> _Whom:
    """The bare nodes of a cluster file."""
    config = load_config(args.config)
    secrets = resolve_secrets(
        file=args.secret_file,
        previous_file=args.previous_secret_file,
        toml_file=config.secret_file,
        toml_previous_file=config.previous_secret_file,
    )
    if secrets is None:
        raise SecretError(
            "no cluster secret was given", advice="Use --secret-file, or secret_file in the cluster file."
        )
    untold = tuple(entry.id for entry in config.nodes if not entry.address.port)
    if untold and config.discovery != "beacon":
        raise ConfigError(f"{args.config} gives {', '.join(untold)} no port", advice="Write one, or set discovery.")
    return _Whom(
        cluster=config.name,
        secrets=secrets,
        nodes={entry.id: [entry.address] if entry.address.port else [] for entry in config.nodes},
        untold=untold,
    )

"""`discover`: who announces itself on this network."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import time

from mlxcel_nb.cluster.config import DEFAULT_CLUSTER
from mlxcel_nb.cluster.names import new_incarnation, visitor_id
from mlxcel_nb.cluster.secret import Secrets, read_secret_file, resolve_secrets
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.session import Session
from mlxcel_nb.display.network import discovered_view
from mlxcel_nb.display.view import View, note
from mlxcel_nb.errors import ClusterError, SecretError, StepTimeout
from mlxcel_nb.net.discovery import beacons as discovery
from mlxcel_nb.net.measuring.ping import VISITOR_ROLE
from mlxcel_nb.util.loop import LoopThread

SLACK_S = 10.0
"""For opening and closing the sockets of a busy host."""
LOOK_S = 0.2
"""Between two looks at the clock, for the bar."""


def discover(args: argparse.Namespace, context: Context) -> int:
    """Handler of `discover`; a notebook runs a loop already, so it gets one of its own."""
    cluster, secrets = _whose(args, context.session)
    announce = None
    if args.announce:
        announce = discovery.Announcement(node_id=visitor_id(), role=VISITOR_ROLE, incarnation=new_incarnation())
    loop = LoopThread("mlxcel-discover")
    try:
        with context.console.progress(f"Listening for nodes of {cluster}") as progress:
            listening = loop.spawn(discovery.discover(cluster, secrets, seconds=args.seconds, announce=announce))
            began = time.monotonic()
            while not listening.done():
                elapsed = time.monotonic() - began
                if elapsed > args.seconds + SLACK_S:
                    raise StepTimeout(f"listening did not end within {elapsed:.0f} s")
                progress.update(min(elapsed, args.seconds), args.seconds)
                concurrent.futures.wait([listening], LOOK_S)
            found = listening.result()
            if getattr(args, "json", False):
                line = json.dumps({"cluster": cluster, "seconds": args.seconds, **found.to_dict()})
                progress.finish(View(line, note(line).html))
            else:
                private = _is_private(args, context.session)
                progress.finish(discovered_view(found, cluster=cluster, seconds=args.seconds, private=private))
    finally:
        loop.close()
    return 0 if found.nodes else 1


def _whose(args: argparse.Namespace, session: Session) -> tuple[str, Secrets]:
    """The cluster's name, and its secrets: of this notebook's own cluster where none is given."""
    if args.secret_file is None:
        try:
            held = session.get(args.cluster).cluster
        except ClusterError:
            pass
        else:
            older = args.previous_secret_file
            return held.name, Secrets(held.secret, None if older is None else read_secret_file(older))
    secrets = resolve_secrets(file=args.secret_file, previous_file=args.previous_secret_file)
    if secrets is None:
        raise SecretError("no cluster secret was given", advice="Use --secret-file, or MLXCEL_CLUSTER_SECRET_FILE.")
    return args.cluster or DEFAULT_CLUSTER, secrets


def _is_private(args: argparse.Namespace, session: Session) -> bool:
    """Whether `_whose` gives a secret that a cluster of this notebook made for itself, and no other host can know."""
    if args.secret_file is not None:
        return False
    try:
        return session.get(args.cluster).cluster.secret_is_random
    except ClusterError:
        return False

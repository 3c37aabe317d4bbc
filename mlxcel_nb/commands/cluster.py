"""`cluster start|status|stop|list` and `status`."""

from __future__ import annotations

import argparse
import os
import time

from mlxcel_nb.cluster.secret import resolve_secret
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.platforms import missing_back_end
from mlxcel_nb.display.reports import node_view, status_view
from mlxcel_nb.display.view import Column, note, table
from mlxcel_nb.errors import ConfigError


def start(args: argparse.Namespace, context: Context) -> None:
    """Handler of `cluster start`."""
    if problem := missing_back_end():
        raise ConfigError(problem)
    begun = time.monotonic()
    with context.console.progress(starting(args.engines)) as progress:
        held = context.session.start(
            lambda doing: progress.update(0, 0, doing),
            name=args.name,
            n=args.engines,
            secret=resolve_secret(file=args.secret_file),
            deadline=args.deadline,
            threads=args.threads,
            link=args.link,
        )
        nodes = ", ".join(node.node_id for node in held.cluster.nodes)
        progress.finish(note(f"Cluster {held.cluster.name} is up after {time.monotonic() - begun:.1f} s: {nodes}."))


def starting(engines: int) -> str:
    """Title of the progress of a start."""
    return f"Starting {engines} engine{'s' if engines > 1 else ''}"


def status(args: argparse.Namespace, context: Context) -> None:
    """Handler of `status` and `cluster status`."""
    found = context.session.get(args.cluster).cluster.status()
    if args.node is None:
        context.console.show(status_view(found))
    elif any(node.node_id == args.node for node in found.nodes):
        context.console.show(node_view(found, args.node))
    else:
        known = ", ".join(node.node_id for node in found.nodes)
        raise ConfigError(f"no node is called {args.node}", advice=f"There is {known}.")


def stop(args: argparse.Namespace, context: Context) -> None:
    """Handler of `cluster stop`."""
    if args.all:
        stopped = context.session.stop_all()
        context.console.say(f"Stopped {', '.join(stopped)}." if stopped else "No cluster is running.")
    else:
        context.console.say(f"Stopped {context.session.stop(args.cluster)}.")


def list_clusters(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `cluster list`: every cluster of this user on this machine, whoever started it."""
    from mlxcel_nb.launch import registry

    records = registry.list_clusters()
    if not records:
        context.console.say("No cluster runs on this machine.")
        return
    columns = [Column("cluster"), Column("engines", number=True), Column("up", number=True), Column("owner")]
    now = time.time()
    rows = [(record.name, record.n, _age(now - record.created), _owner(record.owner.pid)) for record in records]
    context.console.show(table("", columns, rows))


def _owner(pid: int) -> str:
    return f"this process ({pid})" if pid == os.getpid() else f"process {pid}"


def _age(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

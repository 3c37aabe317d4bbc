"""`load` and `unload`; `load_model` also serves the shell's `generate` and `chat`."""

from __future__ import annotations

import argparse

from mlxcel_nb.client.plans import Plan, prepare
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.commands.console import Console, Progress
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch_meter
from mlxcel_nb.commands.session import Held
from mlxcel_nb.display.reports import load_view
from mlxcel_nb.display.view import note
from mlxcel_nb.models.store import resolve
from mlxcel_nb.util.units import bytes_text

SHOWN = 4
"""Nodes whose progress has room in a line."""


class Meter:
    """Adds up the nodes' progress into one bar, and says of each how far it is. Called from the client's thread."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._nodes: dict[str, LoadProgress] = {}

    def __call__(self, news: LoadProgress) -> None:
        if any(node.comparing != news.comparing for node in self._nodes.values()):
            self._nodes.clear()  # files have been compared, loading begins: other bytes of other totals
        self._nodes[news.node_id] = news
        done = sum(node.done_bytes for node in self._nodes.values())
        total = sum(node.total_bytes for node in self._nodes.values())
        what = "read to compare files; " if news.comparing else ""
        self._progress.update(done, total, f"{bytes_text(done)} of {bytes_text(total)}; {what}{self._each()}")

    def _each(self) -> str:
        """Every node, or of many those that are furthest behind, in the order of their ids."""
        behind = sorted(self._nodes.values(), key=_share)[:SHOWN]
        words = [f"{node.node_id}: {node.what} {_share(node):.0%}" for node in sorted(behind, key=lambda n: n.node_id)]
        more = len(self._nodes) - len(behind)
        return ", ".join(words) + (f", {more} more" if more else "")


def _share(news: LoadProgress) -> float:
    return min(1.0, news.done_bytes / news.total_bytes) if news.total_bytes > 0 else 0.0


def load(args: argparse.Namespace, context: Context) -> None:
    """Handler of `load`."""
    load_model(context.session.get(args.cluster), args, context.console)


def plan_model(args: argparse.Namespace, console: Console) -> Plan:
    """Find the model, fetching it with a bar if need be, and refuse what cannot work before any engine starts."""
    with console.progress(f"Looking at {args.model}") as progress:
        return prepare(
            args.model,
            tp=args.tp,
            pp=args.pp,
            ep=args.ep,
            layers=args.layers,
            dp=args.dp,
            prefill=args.prefill,
            decode=args.decode,
            prefill_layout=args.prefill_layout,
            decode_layout=args.decode_layout,
            micro_batches=args.micro_batches,
            allow_code=args.allow_code,
            progress=fetch_meter(progress),
        )


def load_model(held: Held, args: argparse.Namespace, console: Console, *, quiet: bool = False) -> None:
    """Load what `args` name on the cluster, with a progress bar that becomes the report, or its warnings if `quiet`."""
    with console.progress(f"Loading {args.model}") as progress:
        # A fetch takes minutes: it moves the same bar.
        resolve(args.model, allow_code=args.allow_code, progress=fetch_meter(progress))
        meter = Meter(progress)
        report = held.cluster.load(
            args.model,
            tp=args.tp,
            pp=args.pp,
            ep=args.ep,
            layers=args.layers,
            dp=args.dp,
            prefill=args.prefill,
            decode=args.decode,
            prefill_layout=args.prefill_layout,
            decode_layout=args.decode_layout,
            kv_transfer=args.kv_transfer,
            prefill_from=args.prefill_from,
            route=args.route,
            dtype=args.dtype,
            allow_code=args.allow_code,
            collectives=args.collectives,
            vocab_parallel=args.vocab_parallel,
            micro_batches=args.micro_batches,
            on_progress=meter,
        )
        if not quiet:
            progress.finish(load_view(report))
    if quiet:  # but for what a user should know
        for warning in report.warnings:
            console.remark(note(f"Note: {warning}"))


def unload(args: argparse.Namespace, context: Context) -> None:
    """Handler of `unload`."""
    held = context.session.get(args.cluster)
    held.check_model()
    held.cluster.unload()
    context.console.say("The model is unloaded.")

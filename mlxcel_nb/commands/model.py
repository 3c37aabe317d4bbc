"""`model fetch|list|info|rm`, and fetching with a bar for whoever loads a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxcel_nb.commands.console import Progress
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.display.view import Column, View, note, table
from mlxcel_nb.models import store
from mlxcel_nb.models.info import ModelInfo, model_info
from mlxcel_nb.util.units import bytes_text

STAGES = {
    "download": "downloading",
    "check": "checking",
    "convert": "converting",
    "wait": "waiting for another process that fetches it",
}


def fetch(args: argparse.Namespace, context: Context) -> None:
    """Handler of `model fetch`."""
    with context.console.progress(f"Fetching {args.model}") as progress:
        path = store.resolve(args.model, progress=fetch_meter(progress))
        progress.finish(note(f"{args.model} is in {path}."))


def list_models(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `model list`."""
    columns = [Column("name"), Column("state"), Column("size", number=True), Column("what it is"), Column("folder")]
    rows = [
        (entry.name, "fetched" if entry.fetched else "known", bytes_text(entry.bytes), entry.summary, entry.path)
        for entry in store.list_models()
    ]
    context.console.show(table("", columns, rows))


def info(args: argparse.Namespace, context: Context) -> None:
    """Handler of `model info`."""
    with context.console.progress(f"Reading {args.model}") as progress:
        path = store.resolve(args.model, progress=fetch_meter(progress))
        facts = model_info(path)
        progress.finish(_facts(args.model, path, facts))


def _facts(model: str, path: Path, facts: ModelInfo) -> View:
    rows = [
        ("folder", path),
        ("architecture", facts.model_type),
        ("layers", facts.layers),
        ("hidden size", facts.hidden),
        ("heads", f"{facts.heads} of {facts.head_dim}, {facts.kv_heads} for keys and values"),
        ("vocabulary", facts.vocab),
        ("context", f"{facts.context} tokens" if facts.context else None),
        ("embeddings", "tied to the head" if facts.tied else "apart from the head"),
        ("precision", facts.precision),
        ("chat template", "yes" if facts.chat_template else "no: a base model, use generate"),
        ("weights", bytes_text(facts.bytes)),
        ("content", f"sha256 {facts.content_hash[:16]}"),
    ]
    return table("", [Column("model"), Column(model)], rows)


def rm(args: argparse.Namespace, context: Context) -> None:
    """Handler of `model rm`."""
    freed = store.remove(args.model)
    context.console.say(f"Removed {args.model}: {bytes_text(freed)} are free again.")


def fetch_meter(progress: Progress) -> store.Progress:
    """A callback for the store that moves `progress`."""

    def update(stage: str, done: int, total: int) -> None:
        of = f" {bytes_text(done)} of {bytes_text(total)}" if total else ""
        progress.update(done, total, STAGES.get(stage, stage) + of)

    return update

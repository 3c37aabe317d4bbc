"""`kv save|load|list|remove`: what a model has read, kept over kernels and splits."""

from __future__ import annotations

import argparse
import time

from mlxcel_nb.commands import prompts
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.display.view import Column, note, table
from mlxcel_nb.models import kv_file
from mlxcel_nb.util.units import bytes_text


def save(args: argparse.Namespace, context: Context) -> None:
    """Handler of `kv save`."""
    kv_file.path_of(args.name)  # before anything is read for a name that cannot be
    prompt = prompts.choose(args.prompt, context.prompt)
    held = context.session.get(args.cluster)
    held.check_model()
    talk = held.conversation
    turns = [*([{"role": "system", "content": talk.system}] if talk.system else []), *talk.turns]
    with context.console.progress(f"Saving {args.name}") as progress:
        report = held.cluster.save_kv(
            args.name,
            prompt,
            conversation=turns if prompt is None and talk.turns else (),
            on_progress=lambda done, of: progress.update(done, of, f"{done} of {of} tokens"),
        )
        progress.finish(note(
            f"{report.tokens} tokens are saved as {report.name}, {bytes_text(report.nbytes)}, in {report.path}."
        ))  # fmt: skip


def load(args: argparse.Namespace, context: Context) -> None:
    """Handler of `kv load`."""
    held = context.session.get(args.cluster)
    held.check_model()
    with context.console.progress(f"Loading {args.name}") as progress:
        report = held.cluster.load_kv(
            args.name, on_progress=lambda done, of: progress.update(done, of, f"{done} of {of} tokens")
        )
        split = "" if report.saved_layout == report.layout else f", saved as {report.saved_layout}"
        kept = f"{report.tokens} tokens of {report.name} are there{split}"
        if report.tokens < report.saved_tokens:
            kept += f"; for the other {report.saved_tokens - report.tokens} there is no room"
        talk = held.conversation
        if report.messages:
            turns = [dict(each) for each in report.messages]
            talk.instruct(turns.pop(0)["content"] if turns[0].get("role") == "system" else None)
            talk.turns[:] = turns
            kept += f"; chat goes on after {len(turns)} turns"
        progress.finish(note(f"{kept}."))


def list_saved(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `kv list`."""
    found = kv_file.list_saved()
    if not found:
        context.console.say("Nothing has been saved.")
        return
    columns = [
        Column("name"), Column("model"), Column("tokens", number=True), Column("turns", number=True),
        Column("size", number=True), Column("type"), Column("saved as"), Column("when"),
    ]  # fmt: skip
    rows = []
    for each in found:
        if (header := each.header) is None:
            rows.append((each.name, each.problem, None, None, bytes_text(each.nbytes), None, None, None))
            continue
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(header.created))
        turns = len(header.messages) or None
        size = bytes_text(each.nbytes)
        rows.append((each.name, header.model, header.tokens, turns, size, header.dtype, header.layout, when))  # type: ignore[arg-type]
    context.console.show(table("", columns, rows))


def remove(args: argparse.Namespace, context: Context) -> None:
    """Handler of `kv remove`."""
    freed = kv_file.remove(args.name)
    context.console.say(f"Removed {args.name}: {bytes_text(freed)} are free again.")

"""`verify`: a model, or every tiny one of the catalogue, whole and in layouts, and where they first differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxcel_nb.client import verifying
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.cluster.layout import members_of
from mlxcel_nb.commands.arguments.verify import OF_A_MODEL, TOKENS
from mlxcel_nb.commands.console import Progress
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch_meter
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.display.verify import catalogue_dict, catalogue_view, model_dict, model_view
from mlxcel_nb.display.view import View, note
from mlxcel_nb.errors import ClusterError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.store import resolve
from mlxcel_nb.models.verifying.catalogued import Finding
from mlxcel_nb.models.verifying.comparing import Verdict
from mlxcel_nb.models.verifying.job import run_job
from mlxcel_nb.models.verifying.prompt import TEXT, prompt_ids

MODEL_LAYOUTS = ("tp2", "pp2", "tp2xpp2")
CATALOGUE_LAYOUTS = ("tp2", "tp3", "tp4", "pp2", "pp3", "tp2xpp2")

NOTHING = "Nothing was run."
IN_PROCESS = "Run in one process: stages one after the other, ranks as threads; no engines, no links."


def verify(args: argparse.Namespace, context: Context) -> int:
    """Handler of `verify`; exit status 0 as `passed` has it for a model; for the catalogue refusals do not count."""
    if args.catalogue == (args.model is not None):
        raise UsageProblem("verify takes a --model or the --catalogue, one of the two", advice=args.see)
    if args.arch and not args.catalogue:
        raise UsageProblem("--arch names an architecture of the --catalogue", advice=args.see)
    if args.catalogue:
        if given := next((name for name in OF_A_MODEL if getattr(args, name, None)), None):
            option = f"--{given.replace('_', '-')}"
            raise UsageProblem(f"{option} belongs to a --model, not to the --catalogue", advice=args.see)
        return _catalogue(args, context)
    args.tokens, args.dtype = args.tokens or TOKENS, args.dtype or "auto"
    return _in_process(args, context) if args.in_process else _on_engines(args, context)


def _catalogue(args: argparse.Namespace, context: Context) -> int:
    """Every architecture that mlx-lm has, or those named."""
    there = catalogue.architectures()
    if unknown := [name for name in args.arch if name not in there]:
        raise UsageProblem(f"mlx-lm has no architecture {unknown[0]!r}", advice="See: docs/architectures.md")
    layouts = args.layouts or CATALOGUE_LAYOUTS
    names = args.arch or there
    with context.console.progress(f"Verifying {names[0] if len(names) == 1 else 'the catalogue'}") as progress:
        said = run_job({"catalogue": names, "layouts": layouts}, progress.update)
        findings = [Finding.from_dict(each["finding"]) for each in said]
        result = catalogue_dict(findings) if _as_json(args) else None
        progress.finish(_json(result) if result else catalogue_view(findings, layouts))
    return int(any(each.wrong for each in findings))


def passed(verdicts: Sequence[Verdict], *, named: bool) -> bool:
    """Something was run, all of it is equal, and no layout that was `named` by hand was refused."""
    ran = [each for each in verdicts if not each.refused]
    return bool(ran) and all(each.equal for each in (verdicts if named else ran))


def _in_process(args: argparse.Namespace, context: Context) -> int:
    """A model without engines."""
    with context.console.progress(f"Verifying {args.model}") as progress:
        folder = resolve(args.model, allow_code=args.allow_code, progress=fetch_meter(progress))
        found = _Found(args, lambda *_: None)
        if found.possible:
            for said in run_job(_job(args, folder, found.possible), progress.update):
                found.add(Verdict.from_dict(said["verdict"]), said["warnings"])
        progress.finish(found.view("one process", "", IN_PROCESS if found.possible else NOTHING))
    return found.status


def _on_engines(args: argparse.Namespace, context: Context) -> int:
    """A model on the engines of the cluster that runs, or of one that lives as long as the command."""
    with context.console.progress(f"Verifying {args.model}") as progress:
        folder = resolve(args.model, allow_code=args.allow_code, progress=fetch_meter(progress))
        prompt = _prompt(args, folder)
        running = _running(args, context)
        found = _Found(args, verifying.room_in(running) if running else verifying.room_here)
        name, how = running.name if running else "", NOTHING
        if found.possible:
            with _cluster(running, found.engines, context, progress) as cluster:
                _run(
                    cluster, found, args, prompt, progress, judged=judged(folder, args.dtype), kept=running is not None
                )
                name, how = cluster.name, f"Run on the engines of {cluster.name}, over their links: {cluster.n} here."
        progress.finish(found.view("engines", name, how))
    return found.status


def _run(
    cluster: Cluster,
    found: _Found,
    args: argparse.Namespace,
    prompt: Sequence[int],
    progress: Progress,
    *,
    judged: bool,
    kept: bool,
) -> None:
    layouts, done = found.possible, 0

    def on_layout(name: str) -> None:
        nonlocal done
        progress.update(done, len(layouts) + 1, name)
        done += 1

    def on_progress(news: LoadProgress) -> None:
        what = f"{(verifying.WHOLE, *layouts)[done - 1]}: {news.node_id}: {news.what}"
        progress.update(done - 1, len(layouts) + 1, what)

    for verdict, report in verifying.verify(
        cluster,
        args.model,
        layouts,
        prompt,
        args.tokens,
        dtype=args.dtype,
        allow_code=args.allow_code,
        vocab_parallel=args.vocab_parallel,
        judged=judged,
        kept=kept,
        on_layout=on_layout,
        on_progress=on_progress,
    ):
        found.add(verdict, report.warnings if report else ())


def _running(args: argparse.Namespace, context: Context) -> Cluster | None:
    """The cluster that runs, if one does."""
    named = getattr(args, "cluster", None)
    try:
        return context.session.get(named).cluster
    except ClusterError:
        if named is not None:
            raise
        return None


@contextmanager
def _cluster(running: Cluster | None, engines: int, context: Context, progress: Progress) -> Iterator[Cluster]:
    """That, or another for as long as it takes."""
    if running is not None:
        yield running
        return
    held = context.session.start(lambda doing: progress.update(0, 0, doing), n=engines)
    try:
        yield held.cluster
    finally:
        context.session.stop(held.cluster.name)


class _Found:
    """What is known of each layout that was asked for: first which are refused, then what the others gave."""

    def __init__(self, args: argparse.Namespace, room: verifying.Room) -> None:
        self._args = args
        self._layouts = args.layouts or MODEL_LAYOUTS
        refused = verifying.refusals(args.model, self._layouts, room, allow_code=args.allow_code)
        self._verdicts = {name: Verdict(layout=name, refused=why) for name, why in refused.items()}
        self._notes: dict[str, None] = {}
        self.possible = tuple(name for name in self._layouts if name not in refused)

    @property
    def engines(self) -> int:
        """What the largest of them takes."""
        return max(map(members_of, self.possible))

    def add(self, verdict: Verdict, notes: Iterable[str]) -> None:
        self._verdicts[verdict.layout] = verdict
        self._notes |= dict.fromkeys(notes)

    @property
    def verdicts(self) -> list[Verdict]:
        """In the order in which the layouts were named."""
        return [self._verdicts[name] for name in self._layouts if name in self._verdicts]

    @property
    def status(self) -> int:
        return int(not passed(self.verdicts, named=self._args.layouts is not None))

    def view(self, on: str, cluster: str, how: str) -> View:
        """For people or programs: the arguments are those of `model_dict` and `model_view`."""
        if _as_json(self._args):
            equal = self.status == 0
            return _json(model_dict(self._args.model, self.verdicts, on, cluster, list(self._notes), equal=equal))
        return model_view(self._args.model, self.verdicts, how, [f"Note: {each}" for each in self._notes])


def _job(args: argparse.Namespace, folder: Path, layouts: Sequence[str]) -> dict[str, Any]:
    return {
        "model": str(folder),
        "layouts": layouts,
        "prompt": _prompt(args, folder),
        "tokens": args.tokens,
        "dtype": args.dtype,
        "allow_code": args.allow_code,
        "vocab_parallel": args.vocab_parallel,
        "judged": judged(folder, args.dtype),
    }


def _prompt(args: argparse.Namespace, folder: Path) -> list[int]:
    return prompt_ids(folder, TEXT if args.prompt is None else args.prompt, args.tokens)


def judged(folder: Path, dtype: str) -> bool:
    """Whether equality is promised where the activations turn out to be float32: not of weights that stay quantised."""
    return dtype != "native" or model_info(folder).quantization is None


def _as_json(args: argparse.Namespace) -> bool:
    return bool(args.json)


def _json(data: dict[str, Any]) -> View:
    line = json.dumps(data, ensure_ascii=False)
    return View(line, note(line).html)

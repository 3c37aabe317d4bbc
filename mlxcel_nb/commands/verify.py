"""`verify`: a model, or every tiny one of the catalogue, whole and in layouts, and where they first differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxcel_nb.client import verifying
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.cluster.layout import parse_name
from mlxcel_nb.commands.arguments.verify import OF_A_MODEL, TOKENS
from mlxcel_nb.commands.console import Progress
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch_meter
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.display.verify import catalogue_dict, catalogue_view, model_dict, model_view
from mlxcel_nb.display.view import View, note
from mlxcel_nb.errors import ClusterError, ConfigError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.store import resolve
from mlxcel_nb.models.verifying.catalogued import Finding
from mlxcel_nb.models.verifying.comparing import Verdict
from mlxcel_nb.models.verifying.job import run_job
from mlxcel_nb.models.verifying.prompt import TEXT, prompt_ids

MODEL_LAYOUTS = ("tp2", "pp2", "tp2xpp2")
CATALOGUE_LAYOUTS = ("tp2", "tp3", "tp4", "pp2", "pp3", "tp2xpp2")

IN_PROCESS = "Run in one process: stages one after the other, ranks as threads; no engines, no links."


def verify(args: argparse.Namespace, context: Context) -> int:
    """Handler of `verify`; exit status 0 when all are equal, 1 when something is not."""
    if args.catalogue == (args.model is not None):
        raise UsageProblem("verify takes a --model or the --catalogue, one of the two", advice="See: verify -h")
    if args.arch and not args.catalogue:
        raise UsageProblem("--arch names an architecture of the --catalogue", advice="See: verify -h")
    if args.catalogue:
        if given := next((name for name in OF_A_MODEL if getattr(args, name, None)), None):
            option = f"--{given.replace('_', '-')}"
            raise UsageProblem(f"{option} belongs to a --model, not to the --catalogue", advice="See: verify -h")
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


def _in_process(args: argparse.Namespace, context: Context) -> int:
    """A model without engines."""
    verdicts: list[Verdict] = []
    notes: list[str] = []
    with context.console.progress(f"Verifying {args.model}") as progress:
        folder = resolve(args.model, allow_code=args.allow_code, progress=fetch_meter(progress))
        for said in run_job(_job(args, folder), progress.update):
            verdicts.append(Verdict.from_dict(said["verdict"]))
            notes += said["warnings"]
        progress.finish(_result(args, verdicts, "", IN_PROCESS, notes))
    return int(not all(each.equal for each in verdicts))


def _on_engines(args: argparse.Namespace, context: Context) -> int:
    """A model on the engines of the cluster that runs, or of one that lives as long as the command."""
    with context.console.progress(f"Verifying {args.model}") as progress:
        folder = resolve(args.model, allow_code=args.allow_code, progress=fetch_meter(progress))
        prompt = _prompt(args, folder)
        with _cluster(args, context, progress) as cluster:
            layouts, notes = _that_fit(args, cluster.n)
            done = 0

            def on_layout(name: str) -> None:
                nonlocal done
                progress.update(done, len(layouts) + 1, name)
                done += 1

            found = verifying.verify(
                cluster,
                args.model,
                layouts,
                prompt,
                args.tokens,
                dtype=args.dtype,
                allow_code=args.allow_code,
                vocab_parallel=args.vocab_parallel,
                judged=judged(folder, args.dtype),
                on_layout=on_layout,
                on_progress=lambda news: progress.update(
                    done - 1, len(layouts) + 1, f"{('single', *layouts)[done - 1]}: {news.node_id}: {news.what}"
                ),
            )
            verdicts = []
            for verdict, report in found:
                verdicts.append(verdict)
                notes += report.warnings
            how = f"Run on the engines of {cluster.name}, over their links: {cluster.n} on this machine."
            progress.finish(_result(args, verdicts, cluster.name, how, notes))
    return int(not all(each.equal for each in verdicts))


@contextmanager
def _cluster(args: argparse.Namespace, context: Context, progress: Progress) -> Iterator[Cluster]:
    """The cluster that runs, if one does."""
    engines = verifying.engines_for(args.model, args.layouts or (), allow_code=args.allow_code)
    named = getattr(args, "cluster", None)
    try:
        running = context.session.get(named).cluster
    except ClusterError:
        if named is not None:
            raise
        running = None
    if running is not None:
        if engines > running.n:
            what = f"a layout needs {engines} engines, {running.name} has {running.n}"
            raise ConfigError(what, advice="Start a larger cluster, or verify other layouts.")
        yield running
        return
    if args.layouts is None:
        engines = verifying.engines_for(args.model, MODEL_LAYOUTS, allow_code=args.allow_code)
    held = context.session.start(lambda doing: progress.update(0, 0, doing), n=engines)
    try:
        yield held.cluster
    finally:
        context.session.stop(held.cluster.name)


def _that_fit(args: argparse.Namespace, engines: int) -> tuple[tuple[str, ...], list[str]]:
    """The layouts to try, and what is to be said of those that are not."""
    if args.layouts is not None:
        return args.layouts, []
    fit = tuple(name for name in MODEL_LAYOUTS if parse_name(name).members <= engines)
    if not fit:
        raise ConfigError("one engine cannot split a model", advice="Start a cluster with more, or use --in-process.")
    left = [name for name in MODEL_LAYOUTS if name not in fit]
    return fit, [f"{', '.join(left)} would take more engines"] if left else []


def _result(args: argparse.Namespace, verdicts: list[Verdict], cluster: str, how: str, notes: list[str]) -> View:
    notes = list(dict.fromkeys(notes))
    if _as_json(args):
        return _json(model_dict(args.model, verdicts, cluster, notes))
    return model_view(args.model, verdicts, how, [f"Note: {each}" for each in notes])


def _job(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "layouts": args.layouts or MODEL_LAYOUTS,
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
    return bool(getattr(args, "json", False))


def _json(data: dict[str, Any]) -> View:
    line = json.dumps(data, ensure_ascii=False)
    return View(line, note(line).html)

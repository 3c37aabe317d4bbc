"""`verify`: a model, or every tiny one of the catalogue, whole and in layouts, and where they first differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch_meter
from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.display.verify import catalogue_dict, catalogue_view, model_dict, model_view
from mlxcel_nb.display.view import View, note
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
    return _catalogue(args, context) if args.catalogue else _in_process(args, context)


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
            notes += [f"Note: {warning}" for warning in said["warnings"]]
        notes = list(dict.fromkeys(notes))
        result = model_dict(args.model, verdicts, "", notes) if _as_json(args) else None
        progress.finish(_json(result) if result else model_view(args.model, verdicts, IN_PROCESS, notes))
    return int(not all(each.equal for each in verdicts))


def _job(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder),
        "layouts": args.layouts or MODEL_LAYOUTS,
        "prompt": prompt_ids(folder, TEXT if args.prompt is None else args.prompt, args.tokens),
        "tokens": args.tokens,
        "dtype": args.dtype,
        "allow_code": args.allow_code,
        "judged": judged(folder, args.dtype),
    }


def judged(folder: Path, dtype: str) -> bool:
    """Whether equality is promised where the activations turn out to be float32: not of weights that stay quantised."""
    return dtype != "native" or model_info(folder).quantization is None


def _as_json(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "json", False))


def _json(data: dict[str, Any]) -> View:
    line = json.dumps(data, ensure_ascii=False)
    return View(line, note(line).html)

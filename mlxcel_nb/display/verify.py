"""What `verify` found, as tables and as plain data. Pure: from verdicts to a `View`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcel_nb.display.view import Column, View, stack, table
from mlxcel_nb.models.verifying.catalogued import Finding
from mlxcel_nb.models.verifying.comparing import EQUAL, LARGE, Verdict
from mlxcel_nb.util.versions import local_versions

EQUALS, DIFFERS, NOTHING = "●", "✕", "○"


def model_view(model: str, verdicts: Sequence[Verdict], how: str, notes: Sequence[str]) -> View:
    """A line for each layout, and why where one was not run to its end.

    Args:
        how: on what it was run, as a sentence.
    """
    columns = [Column("layout"), Column(""), Column("tokens"), Column("teacher-forced")]
    columns += [Column("max |Δlogit|", number=True), Column("first layer that differs")]
    rows = [_row(each) for each in verdicts]
    dtypes = sorted({each.dtype for each in verdicts if each.dtype})
    title = f"{model}, whole and split{', in ' + ', '.join(dtypes) if dtypes else ''}"
    views = [table(title, columns, rows, [how, *_promises(verdicts), *notes])]
    said: dict[str, list[str]] = {}
    for each in verdicts:
        if why := each.refused or each.failed:
            said.setdefault(why, []).append(each.layout)
    if said:
        reasons = [[", ".join(names), why] for why, names in said.items()]
        views.append(table("Why", [Column("layouts"), Column("what")], reasons))
    return stack(*views)


def _row(each: Verdict) -> list[object]:
    if each.refused or each.failed:
        return [each.layout, word_of(each), None, None, None, None]
    return [
        each.layout,
        word_of(each),
        _tokens(each.token, each.tokens),
        _tokens(each.forced_token, each.tokens),
        f"{each.delta:.1e}",
        place_of(each),
    ]


def word_of(each: Verdict) -> str:
    """The verdict with its mark."""
    if each.refused:
        return f"{NOTHING} refused"
    if each.failed:
        return f"{DIFFERS} failed"
    if not each.equal:
        return f"{DIFFERS} not equal"
    return f"{EQUALS} equal" if each.judged else f"{EQUALS} same tokens"


def place_of(each: Verdict) -> str | None:
    """The first layer that differs, and where that was seen."""
    if each.layer is None:
        return None if each.equal else "none: it is after the last, or too little to tell"
    return f"layer {each.layer}, seen by {each.member}" if each.member else f"layer {each.layer}"


def _tokens(first: int | None, count: int) -> str:
    return f"the same {count}" if first is None else f"first differs at {first} of {count}"


def _promises(verdicts: Sequence[Verdict]) -> list[str]:
    """What was held against what."""
    run = [each for each in verdicts if not each.refused and not each.failed]
    notes = []
    if judged := [each for each in run if each.judged]:
        most = max(each.allowed for each in judged)
        larger = f", {most:.0e} for logits as large as these" if most > EQUAL else ""
        notes.append(f"Equal means the same tokens, and logits that differ by at most {EQUAL:.0e}{larger}.")
    if others := sorted({each.dtype for each in run if not each.judged}):
        what = ", ".join(others)
        notes.append(f"Rounding shows in {what}: the first differing position and max |Δlogit| are all that is told.")
    return notes


def catalogue_view(findings: Sequence[Finding], layouts: Sequence[str]) -> View:
    """A line for each architecture, and why where something is not equal."""
    columns = [Column("architecture"), Column(""), *(Column(name, number=True) for name in layouts)]
    rows: list[list[object]] = []
    reasons: list[list[object]] = []
    for finding in findings:
        verdicts = {each.layout: each for each in finding.verdicts}
        rows.append([finding.name, _summary(finding), *(_cell(verdicts.get(name)) for name in layouts)])
        reasons += _reasons(finding)
    how = "Tiny random models in float32, in one process: stages one after the other, ranks as threads."
    what = f"Figures are max |Δlogit|; equal: at most {EQUAL:.0e}, more for logits over {LARGE:g}, and the same tokens."
    notes = [how, what, count(findings)]
    views = [table("The catalogue, whole and split", columns, rows, notes)]
    if reasons:
        views.append(table("Why", [Column("architecture"), Column("layouts"), Column("what")], reasons))
    return stack(*views)


def count(findings: Sequence[Finding]) -> str:
    """The result in a sentence."""
    cannot = sum(bool(each.cannot) for each in findings)
    untested = sum(each.untested for each in findings)
    refused = sum(each.refused for each in findings)
    equal = [each for each in findings if not (each.wrong or each.cannot or each.untested or each.refused)]
    partly = sum(any(verdict.refused for verdict in each.verdicts) for each in equal)
    wrong = sum(each.wrong for each in findings)
    words = [f"{len(findings)} architecture{'s' if len(findings) != 1 else ''}: {len(equal)} equal"]
    words += [f"{partly} of them not in every layout"] if partly else []
    words += [f"{wrong} not"] if wrong else []
    words += [f"{refused} in none of these layouts"] if refused else []
    words += [f"{cannot} that mlx-lm itself cannot run here"] if cannot else []
    words += [f"{untested} untested"] if untested else []
    return ", ".join(words) + "."


def _summary(finding: Finding) -> str:
    if finding.untested:
        return f"{NOTHING} untested"
    if finding.wrong:
        return f"{DIFFERS} not equal"
    if finding.refused:
        return f"{NOTHING} refused"
    return f"{NOTHING} cannot run" if finding.cannot else f"{EQUALS} equal"


def _cell(each: Verdict | None) -> str | None:
    if each is None:
        return None
    if each.refused or each.failed:
        return "refused" if each.refused else "failed"
    return f"{each.delta:.0e}" if each.equal else f"{DIFFERS} {each.delta:.0e}"


def _reasons(finding: Finding) -> list[list[object]]:
    """One line for each thing to be said, with the layouts that it holds for."""
    if finding.untested:
        return [[finding.name, None, "mlx-lm has it, the catalogue does not yet"]]
    if finding.cannot:
        return [[finding.name, None, f"mlx-lm's own model: {finding.cannot}"]]
    said: dict[str, list[str]] = {}
    for each in finding.verdicts:
        if not each.equal:
            token = each.forced_token if each.forced_token is not None else each.token
            differs = "" if token is None else f", first token that differs {token} of {each.tokens}"
            what = each.refused or each.failed or f"{place_of(each)}{differs}"
            said.setdefault(what, []).append(each.layout)
    return [[finding.name, ", ".join(names), what] for what, names in said.items()]


def model_dict(
    model: str, verdicts: Sequence[Verdict], on: str, cluster: str, notes: Sequence[str], *, equal: bool
) -> dict[str, Any]:
    """The same for other programs.

    Args:
        equal: the exit status is 0.
        on: "engines", or "one process".
        cluster: whose engines; "" where there is none.
    """
    return {
        "model": model,
        "on": on,
        "cluster": cluster or None,
        "equal": equal,
        "layouts": [each.to_dict() for each in verdicts],
        "notes": list(notes),
    }


def catalogue_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for other programs, and of which libraries it holds."""
    return {
        "catalogue": [each.to_dict() for each in findings],
        "on": "one process",
        "versions": dict(local_versions()),
        "equal": not any(each.wrong for each in findings),
        "untested": [each.name for each in findings if each.untested],
    }

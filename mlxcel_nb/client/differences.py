"""Whether nodes have the same model: from what each said of its folder to one error with a table of all. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlxcel_nb.errors import (
    EngineLost,
    MlxcelError,
    ModelAbsent,
    ModelCutShort,
    ModelError,
    PeerLost,
    StepTimeout,
    Table,
)
from mlxcel_nb.models.digest import whole_sha256

Digests = Mapping[str, str]
"""Hex SHA-256 by file name."""

SHOWN = 16
"""Hex digits of a hash that an error quotes: enough to look it up by, and to fit two into a line."""

TABLED = 12
"""Hex digits of a hash in the table, where more nodes stand under each other."""

NAMED = 2
"""Nodes whose cause the first line says; those beyond are in the table."""

FILES = 3
"""Files whose hashes have a column of the table."""

AGAIN = "Copy the model's folder from one to the other, or get it again, so that all nodes have the same files."


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one node says of its model folder.

    Args:
        path: where the folder lies, as the node has it; "" where it has not said.
        size: bytes of the model's files, None where there are none or it has not said.
        digests: of its files, None where there is an `error`, or it has not read them to the end.
    """

    node: str
    host: str = ""
    path: str = ""
    size: int | None = None
    digests: Digests | None = None
    error: MlxcelError | None = None


def difference(found: Sequence[Found]) -> MlxcelError | None:
    """What is wrong with the nodes that have other files than most, or none, with a table; None where all are equal.

    Of several kinds that are as common the leader's is taken for right. Nodes that have no model, or another, come
    first in the error; if there are none, it is of the kind of what befell the first that did not answer. Nodes that
    are gone are an error without a table when that is all.

    Args:
        found: of each node, the leader's first.
    """
    usual, note = _reference(found)
    faults = [each for each in found if each.error is not None or (each.digests and _other(each, usual))]
    if not faults:
        return None
    faults.sort(key=lambda each: not _of_files(each))
    first, *others = faults
    if first.error is not None and not any(_of_files(each) or isinstance(each.error, StepTimeout) for each in faults):
        return first.error
    causes = [_cause(first, usual), *(f"{each.node}: {_cause(each, usual)}" for each in others)]
    if len(causes) > NAMED:
        causes[NAMED:] = [f"{len(causes) - NAMED} more"]
    kind = ModelError if first.error is None else type(first.error)
    advice = first.error.advice if first.error is not None else None
    if _of_files(first) and (advice is None or others):
        advice = AGAIN
    error = kind("; ".join([*causes, "nothing was loaded"]), node=first.node, advice=advice)
    error.table = _table(found, usual, note)
    return error


def _reference(found: Sequence[Found]) -> tuple[Found | None, str]:
    """The first node that has what counts as right, and why it does."""
    whole = [each for each in found if each.digests]
    if not whole:
        return None, "No node has a whole model to hold the others against."
    kinds = {each.node: whole_sha256(each.digests or {}) for each in whole}
    ranked = Counter(kinds.values()).most_common()
    most = ranked[0][1]
    common = {kind for kind, count in ranked if count == most}
    usual = next(each for each in whole if kinds[each.node] in common)
    if len(ranked) == 1:
        return usual, f"Nodes with a whole model have {usual.node}'s."
    if len(common) == 1:
        return usual, f"Held against {usual.node}'s files, the most common: {most} of {len(found)} nodes have them."
    whose = "the leader's" if usual is found[0] else "the first in order"
    return usual, f"Held against {usual.node}'s files, {whose}: no others are more common."


def _of_files(each: Found) -> bool:
    return each.error is None or isinstance(each.error, ModelError)


def _other(each: Found, usual: Found | None) -> str | None:
    """The first file by name that `each` has otherwise than `usual`."""
    if each.digests is None or usual is None or usual.digests is None:
        return None
    here, there = each.digests, usual.digests
    return next((name for name in sorted({*here, *there}) if here.get(name) != there.get(name)), None)


def _cause(each: Found, usual: Found | None) -> str:
    name = _other(each, usual)
    if name is None or usual is None:
        return each.error.cause.rstrip(".") if each.error else ""
    here, there = (each.digests or {}).get(name), (usual.digests or {}).get(name)
    if here is None:
        return f"has no {name}, which {usual.node} has with sha256 {str(there)[:SHOWN]}"
    if there is None:
        return f"has a {name} with sha256 {here[:SHOWN]}, which {usual.node} has not"
    return f"has another {name} than {usual.node}: sha256 {here[:SHOWN]}, not {there[:SHOWN]}"


def _state(each: Found, usual: Found | None) -> str:
    """In a mark and words."""
    match each.error:
        case None:
            pass
        case ModelAbsent():
            return "✕ absent"
        case ModelCutShort():
            return "✕ cut short"
        case ModelError():
            return "✕ not whole"
        case StepTimeout():
            return "✕ no answer"
        case PeerLost() | EngineLost():
            return "✕ gone"
        case _:
            return "✕ failed"
    if each.digests is None:
        return "○ still reading"
    name = _other(each, usual)
    if name is None:
        return "● ok"
    if name not in each.digests:
        return f"✕ no {name}"
    return f"✕ another {name}" if usual and name in (usual.digests or {}) else f"✕ {name} too many"


def _table(found: Sequence[Found], usual: Found | None, note: str) -> Table:
    """A row for each node; hashes of the files that differ, or of all together where none does."""
    differing = list(dict.fromkeys(name for each in found if (name := _other(each, usual))))[:FILES]
    hashes = [f"sha256 of {name}" for name in differing] or ["sha256"]
    rows = [
        (
            each.node,
            each.host or None,
            each.path or None,
            _state(each, usual),
            *([_short(each.digests, name) for name in differing] or [_short(each.digests, None)]),
            None if each.size is None else f"{each.size:,}",
        )
        for each in found
    ]
    columns = ("node", "host", "path", "state", *hashes, "bytes")
    return Table("The model on each node", columns, tuple(rows), numbers=("bytes",), notes=(note,))


def _short(digests: Digests | None, name: str | None) -> str | None:
    if not digests:
        return None
    digest = whole_sha256(digests) if name is None else digests.get(name)
    return digest[:TABLED] if digest else None

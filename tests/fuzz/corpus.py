"""Where the inputs are kept that reached something new: a text file a target, in it a line of hexadecimal an input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import mlxcel_nb

FOLDER = Path(__file__).parent / "corpus"
PACKAGE = str(Path(mlxcel_nb.__file__).parent)


def read_corpus(target: str) -> list[bytes]:
    """The inputs of `target`, short ones first."""
    path = FOLDER / f"{target}.txt"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_corpus(target: str, inputs: Iterable[bytes]) -> None:
    lines = sorted({data.hex() for data in inputs}, key=lambda line: (len(line), line))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))


def minimised(target: Callable[[bytes], None], inputs: Iterable[bytes]) -> list[bytes]:
    """Those of `inputs`, short ones first, that take a step from line to line in the package that none before took."""
    seen: set[tuple[str, int, int]] = set()
    kept = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        steps = _steps(target, data)
        if not steps <= seen:
            seen |= steps
            kept.append(data)
    return kept


def _steps(target: Callable[[bytes], None], data: bytes) -> set[tuple[str, int, int]]:
    steps: set[tuple[str, int, int]] = set()

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return None
        last = frame.f_lineno

        def stepped(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event in {"line", "return"}:
                steps.add((name, last, frame.f_lineno if event == "line" else -1))
                last = frame.f_lineno
            return stepped

        return stepped

    before = sys.gettrace()
    sys.settrace(called)
    try:
        target(data)
    finally:
        sys.settrace(before)
    return steps

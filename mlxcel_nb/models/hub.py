"""Models of the Hugging Face hub, through huggingface_hub's ordinary client, where there is a net.

Only data files are asked for: Python files of a model never reach the disk. Whether the hub can be reached is found
out within seconds; offline, a model that was downloaded before is still used. Blocking; any thread may call.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import atomic
from mlxcel_nb.models.registry import Progress

ANSWER_S = 6.0
"""The hub's first answer comes within this, or it counts as out of reach."""

DATA_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]


def download(repo: str, *, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The local folder of hub model `repo`, at `revision` (a branch, tag or commit).

    Raises:
        ModelError: the hub cannot be reached and the model is not here, it does not exist, or there is no room.
    """
    import huggingface_hub as hf
    from huggingface_hub import constants, errors

    offline = constants.HF_HUB_OFFLINE
    listing = None if offline else _listing(hf, repo, revision)
    if isinstance(listing, errors.RepositoryNotFoundError | errors.RevisionNotFoundError | errors.GatedRepoError):
        if isinstance(listing, errors.GatedRepoError):
            raise ModelError(f"{repo} asks for its licence to be accepted", advice="Accept it, then `hf auth login`.")
        raise ModelError(f"there is no model {repo} on the hub, or it is private", advice="Check the spelling.")
    if listing is None or isinstance(listing, Exception):
        return _downloaded_before(hf, repo, revision, "HF_HUB_OFFLINE is set" if offline else "the hub is out of reach")
    siblings = [s for s in listing.siblings or [] if any(Path(s.rfilename).match(p) for p in DATA_FILES)]
    if not any(s.rfilename.endswith(".safetensors") for s in siblings):
        raise ModelError(f"{repo} has no safetensors", advice="Choose a repository with an MLX or Hugging Face model.")
    total = sum(s.size or 0 for s in siblings)
    cache = Path(constants.HF_HUB_CACHE)
    with atomic.disk_errors(cache, total):
        cache.mkdir(parents=True, exist_ok=True)
        here = _known_bytes(hf, repo, listing.sha, siblings)
        atomic.require_room(cache, total - here)
        try:
            folder = hf.snapshot_download(
                repo, revision=revision, allow_patterns=DATA_FILES, tqdm_class=_bars(progress, total)
            )
        except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
            raise ModelError(f"the download of {repo} broke off: {_line(error)}", advice="Try again.") from error
    return Path(folder)


def _listing(hf: Any, repo: str, revision: str | None) -> Any:
    """What the hub says of `repo`; the exception it raised; None when it does not answer in time.

    On a thread of its own, because the client retries at length where a name resolves and nothing answers.
    """
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(hf.HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=ANSWER_S))
        except Exception as error:  # noqa: BLE001 - whatever the client raises is the answer
            answer.append(error)

    thread = threading.Thread(target=ask, name="hub-listing", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    return answer[0] if answer else None


def _downloaded_before(hf: Any, repo: str, revision: str | None, why: str) -> Path:
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = hf.snapshot_download(repo, revision=revision, allow_patterns=DATA_FILES, local_files_only=True)
        return Path(folder)
    except (LocalEntryNotFoundError, ValueError):
        advice = "Give a local folder or GGUF file, or a model of `mlxcel-nb model list`."
        raise ModelError(f"{repo} is not on this machine, and {why}", advice=advice) from None


def _known_bytes(hf: Any, repo: str, commit: str, siblings: list[Any]) -> int:
    found = [s for s in siblings if isinstance(hf.try_to_load_from_cache(repo, s.rfilename, revision=commit), str)]
    return sum(s.size or 0 for s in found)


def _bars(progress: Progress | None, total: int) -> Any:
    """A progress-bar class that draws nothing and reports bytes."""
    from tqdm.auto import tqdm

    done = 0
    lock = threading.Lock()

    class Report(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal done
            if progress and self._counts and n:
                with lock:
                    done += int(n)
                    progress("download", min(done, total), total)
            return None

    return Report


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

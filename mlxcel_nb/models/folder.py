"""Reading the small files of a model folder. Any thread; folders are not trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file.

    Raises:
        ModelError: the file is there and is not a JSON object.
    """
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not JSON", advice="Get the model again.") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object", advice="Get the model again.")
    return data


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "*.tiktoken")
"""What a tokenizer is kept in, of whichever kind."""


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without any tokenizer, before its weights are read.

    Raises:
        ModelError: saying what is missing.
    """
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelError(f"{folder} has no tokenizer: tokenizer.json is missing", advice="Get the model again.")

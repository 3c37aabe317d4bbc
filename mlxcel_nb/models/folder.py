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

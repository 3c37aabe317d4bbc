"""The fields of a JSON body, read one by one: each has a type and a range, and what is left over is named. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from mlxcel_nb.models.params import is_number
from mlxcel_nb.serve.failures import ApiError, refused

T = TypeVar("T")

LONGEST_NAME = 60
"""Of a field, that is compared with those there are: it takes the square of the length."""


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises:
        ApiError: it is no JSON, no object, or holds text that is none.
    """
    try:
        # As UTF-8 alone: by itself `loads` takes other encodings, and halves of surrogate pairs in all of them.
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except UnicodeError:
        raise refused("the body has text that is not Unicode") from None
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "numbers too large, or nested too deeply"
        raise refused(f"the body is not JSON: {why}") from None
    if not isinstance(value, dict):
        raise refused("the body is not a JSON object")
    return value


def _no_constant(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is no JSON", "", 0)


class Fields:
    """A body whose fields are taken out. A field that is null is as good as absent."""

    def __init__(self, body: Mapping[str, Any], *, within: str = "") -> None:
        self._left = {name: value for name, value in body.items() if value is not None}
        self._within = f"{within}." if within else ""
        self._taken: set[str] = set()

    def any(self, name: str) -> Any:
        """Whatever stands there, or None."""
        self._taken.add(name)
        return self._left.pop(name, None)

    def text(self, name: str) -> str | None:
        return self._typed(name, str, "a string")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._typed(name, bool, "true or false")
        return default if value is None else value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value: int | float | None = self.any(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            return value
        raise self.wrong(name, f"must be a whole number from {low} to {high}")

    def number(self, name: str, low: float, high: float) -> float | None:
        value: float | None = self.any(name)
        if value is None or (is_number(value) and low <= value <= high):
            return value
        raise self.wrong(name, f"must be a number from {low:g} to {high:g}")

    def object(self, name: str) -> dict[str, Any] | None:
        return self._typed(name, dict, "an object")

    def list(self, name: str) -> list[Any] | None:
        return self._typed(name, list, "a list")

    def one_of(self, name: str, choices: Iterable[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in (known := list(choices)):
            raise self.wrong(name, f"must be one of {', '.join(known)}")
        return value

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that may be there and change nothing."""
        for name in names:
            self.any(name)

    def end(self) -> None:
        """Refuse what nobody has taken, with the nearest name that somebody would have."""
        for name in self._left:
            likely = sorted(self._taken) if len(name) <= LONGEST_NAME else []
            near = difflib.get_close_matches(name, likely, n=1, cutoff=0.75)
            guess = f", perhaps {near[0]}" if near else ""
            raise refused(
                f"unrecognized request argument: {self._within}{name:.60}{guess}", f"{self._within}{name:.60}"
            )

    def wrong(self, name: str, what: str) -> ApiError:
        return refused(f"{self._within}{name} {what}", f"{self._within}{name}")

    def _typed(self, name: str, kind: type[T], words: str) -> T | None:
        value = self.any(name)
        if value is None or isinstance(value, kind):
            return value
        raise self.wrong(name, f"must be {words}")

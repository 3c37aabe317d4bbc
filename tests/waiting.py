"""Waiting for a condition, with an end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether `condition` came true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)  # the pace of the looks, not what is waited for
    return True

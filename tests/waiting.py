"""Waiting for a condition, with an end; processes that may end at any moment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil


def until(condition: Callable[[], Any], seconds: float = 10.0) -> bool:
    """Whether `condition` came true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)  # the pace of the looks, not what is waited for
    return True


@contextmanager
def started(*words: Any, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """`Popen`, whose own end of a `with` waits for the process, however long it runs: here a test that has failed
    kills it.
    """
    with subprocess.Popen(*words, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; of one that is gone by now, none."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []

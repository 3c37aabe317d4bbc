"""An asyncio loop on a thread of its own.

The client in a notebook and every node keep their slow-path sockets on one. Synchronous callers on any other
thread hand it coroutines with `call`; because the caller's own thread never runs a loop of ours, that works in
a cell, in a cell with `await`, inside a running task and in a plain script alike.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from mlxcel_nb.errors import StepTimeout

T = TypeVar("T")


class LoopThread:
    """One daemon thread that runs one loop from `__init__` to `close`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    @property
    def here(self) -> bool:
        """Whether the caller is on the loop's own thread."""
        return threading.current_thread() is self._thread

    def spawn(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coro` on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    def call(self, coro: Coroutine[Any, Any, T], *, timeout: float, what: str) -> T:
        """Run `coro` on the loop and wait for it. An interrupt of the caller cancels it.

        Raises:
            StepTimeout: after `timeout` seconds, saying `what` was waited for.
        """
        if self.here:
            coro.close()
            raise RuntimeError("call() would wait on its own thread")
        future = self.spawn(coro)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise StepTimeout(f"waited {timeout:g} s for {what}") from None
        except BaseException:
            future.cancel()
            raise

    def soon(self, function: Callable[..., object], *args: object) -> None:
        """Call `function` on the loop, from any thread; a closed loop is ignored."""
        try:
            # A closure, because asyncio prints the arguments of a callback that fails or is slow: prompts, or answers.
            self.loop.call_soon_threadsafe(lambda: function(*args))
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def close(self, timeout: float = 5.0) -> None:
        """Stop the loop, cancel what is left on it, and join the thread."""
        if self.loop.is_closed():
            return
        self.soon(self.loop.stop)
        self._thread.join(timeout)

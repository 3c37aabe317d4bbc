"""A real kernel, driven like a front end drives one: what each cell printed, displayed and answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

CELL_S = 60.0


@dataclass
class Ran:
    """One executed cell."""

    id: str
    status: str = ""
    error: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    pressed: float | None = None

    @property
    def stopped_s(self) -> float:
        """Seconds from the interrupt to the end of the cell."""
        assert self.pressed is not None, "the cell ended before it could be interrupted"
        return self.arrivals[-1] - self.pressed

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [m["content"] for m in self.messages if m["msg_type"] in kinds]

    @property
    def text(self) -> str:
        """What the cell printed."""
        return "".join(c["text"] for c in self.of("stream") if c["name"] == "stdout")

    @property
    def plain(self) -> str:
        """The plain-text twins of the displays as they were in the end, a line each."""
        shown: dict[str, str] = {}
        for content in self.of("display_data", "update_display_data", "execute_result"):
            key = content.get("transient", {}).get("display_id") or f"_{len(shown)}"
            shown[key] = content["data"]["text/plain"]
        return "\n".join(shown.values())

    @property
    def bytes(self) -> int:
        return sum(len(str(m["content"])) for m in self.messages)


class Notebook:
    """Runs cells in a kernel, one after the other."""

    def __init__(self, client: BlockingKernelClient, manager: KernelManager) -> None:
        self.client = client
        self.manager = manager

    def run(self, code: str, *, timeout: float = CELL_S, stop_when: Callable[[Ran], object] = lambda ran: False) -> Ran:
        """Execute `code` and wait for its end; the kernel is interrupted once, when `stop_when` is true of the cell."""
        ran = Ran(self.client.execute(code))
        deadline = time.monotonic() + timeout
        idle = False
        while not (idle and ran.status):
            left = deadline - time.monotonic()
            assert left > 0, f"the cell did not end within {timeout:g} s; so far: {ran.text!r} {ran.plain!r}"
            if idle:
                reply = self.client.get_shell_msg(timeout=left)
                if reply["parent_header"].get("msg_id") == ran.id:
                    ran.status = reply["content"]["status"]
                continue
            try:
                message = self.client.get_iopub_msg(timeout=min(left, 0.2))
            except Exception as empty:
                if type(empty).__name__ != "Empty":
                    raise
                continue
            if message["parent_header"].get("msg_id") != ran.id:
                continue
            idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            if message["msg_type"] == "error":
                ran.error = "\n".join(message["content"]["traceback"])
            ran.messages.append(message)
            ran.arrivals.append(time.monotonic())
            if ran.pressed is None and not idle and stop_when(ran):
                ran.pressed = time.monotonic()
                self.manager.interrupt_kernel()
        return ran

    def ok(self, code: str, *, timeout: float = CELL_S) -> Ran:
        """`run`, for a cell that has to succeed."""
        ran = self.run(code, timeout=timeout)
        assert ran.status == "ok", ran.error or ran.of("stream")
        return ran

    def value(self, expression: str) -> Any:
        """The value of an expression made of plain literals."""
        import ast

        return ast.literal_eval(self.ok(f"print(repr({expression}))").text)

    def complete(self, code: str, cursor: int | None = None) -> list[str]:
        reply = self.client.complete(code, cursor, reply=True, timeout=CELL_S)["content"]
        assert reply["status"] == "ok"
        return list(reply["matches"])


@contextmanager
def notebook() -> Iterator[Notebook]:
    """A fresh kernel, gone afterwards."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=30)
        yield Notebook(client, manager)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
        manager.cleanup_resources()

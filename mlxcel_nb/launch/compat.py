"""Everything we use of ipyparallel and ipykernel that they do not promise: one place to mend when they change.

`tests/launch/test_compat.py` holds each of these names to what is expected of it. The client half is called in the
owner's process, from any thread; the engine half in an engine, before its kernel serves anything.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any

Content = dict[str, Any]
Reply = concurrent.futures.Future[Content]

ControlHandler = Callable[[Content], Content]
"""From a request's content to the reply's content. Runs on the engine's control thread."""


def engine_ids(client: Any) -> dict[str, int]:
    """Registered engines: the name each gave itself, and the number the hub gave it."""
    return {str(uuid): int(number) for number, uuid in dict(client._engines).items()}


def control_request(client: Any, node_id: str, msg_type: str, content: Content) -> Reply:
    """Send `content` to one engine over the control channel. The future holds the content of the reply.

    It never ends when the engine dies before it answers: wait with a deadline.
    """
    message = client._send(client._control_stream, msg_type, content=content, ident=node_id.encode())
    reply: Reply = concurrent.futures.Future()

    def hand_over(done: Any) -> None:
        if not reply.cancelled():
            reply.set_result(done.result()["content"])

    message.add_done_callback(hand_over)
    return reply


def lend_magics(client: Any) -> None:
    """Point `%px` at this client where it points at one that is closed; the first of a session does so by itself."""
    from IPython import get_ipython

    shell = get_ipython()
    if shell is not None:
        px = shell.find_line_magic("px")
        if px is None or px.__self__.view.client._closed:
            client.activate()


def add_control_handler(kernel: Any, msg_type: str, handler: ControlHandler) -> None:
    """Answer `<msg_type>_request` on the engine's control channel with what `handler` returns."""

    def handle(stream: Any, ident: Any, message: dict[str, Any]) -> None:
        content = handler(message["content"])
        kernel.session.send(stream, f"{msg_type}_reply", content, parent=message, ident=ident)

    kernel.control_handlers[f"{msg_type}_request"] = handle


def controller_class() -> type[Any]:
    """An `IPController` that is one process, listens on Unix sockets, and says when it is up.

    ipyparallel chooses TCP ports by closing them again before use, so controllers that start at the same time can
    choose the same one; sockets in a private folder cannot collide, and no other user can reach them.
    """
    import threading

    from ipyparallel.controller.app import IPController

    from mlxcel_nb.launch.registry import write_private

    class LocalController(IPController):
        heartmonitor_process: Any
        _used = 0

        def next_port(self, pool_name: str = "common") -> int:  # noqa: ARG002  # the original's signature
            self._used += 1
            return self._used

        def construct_url(self, kind: str, channel: str, index: Any = None) -> str:
            # Engines and clients write a colon here for every transport; the original writes a dash.
            info = getattr(self, f"{kind}_info")
            port = info[channel] if index is None else info[channel][index]
            return f"{info['interface']}:{port}"

        def initialize(self, argv: Any = None) -> None:
            super().initialize(argv)
            # ipykernel 7 greets each subscriber, which ipyparallel 9.2 takes for an error.
            self.log.addFilter(lambda record: "iopub_welcome" not in record.getMessage())

        def init_hub(self) -> None:
            super().init_hub()
            process = self.heartmonitor_process  # not started yet
            options = {**process._kwargs, "log_level": self.log_level}
            self.heartmonitor_process = threading.Thread(
                target=process._target, kwargs=options, name="heartmonitor", daemon=True
            )

        def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
            import json
            from pathlib import Path

            # Once the loop runs, so that whoever finds the file finds a hub that answers.
            path = Path(self.profile_dir.security_dir) / fname
            self.loop.add_callback(write_private, path, json.dumps(cdict))

        def init_signal(self) -> None:
            """Signals keep what our own main chose."""

    return LocalController


def engine_class(install: Callable[[Any], None]) -> type[Any]:
    """An `IPEngine` that calls `install(kernel)` before the kernel serves, and leaves signals and descriptors alone."""
    import logging
    import sys

    from ipykernel.iostream import OutStream
    from ipyparallel.engine.app import IPEngine
    from traitlets import observe

    class PlainStream(OutStream):
        """Sends what Python prints to the client; what native code writes stays in the log."""

        def __init__(self, session: Any, pub_thread: Any, name: str) -> None:
            super().__init__(session, pub_thread, name, watchfd=False)

    class LocalEngine(IPEngine):
        def _out_stream_factory_default(self) -> type[Any]:
            return PlainStream

        @observe("kernel")
        def _kernel_made(self, change: Any) -> None:
            if change["new"] is not None:
                install(change["new"])

        def load_connection_file(self) -> None:
            # At DEBUG applications write their whole configuration: here, and whenever it changes. The session has
            # the key by the end of this; nothing else needs it.
            level = self.log.level
            self.log.setLevel(max(level, logging.INFO))
            try:
                super().load_connection_file()
            finally:
                self.log.setLevel(level)
                self.config.Session.pop("key", None)

        def init_engine(self) -> None:
            super().init_engine()
            # The original puts the working folder in front; last, no file of the user's stands in for a library.
            sys.path[:] = [*filter(None, sys.path), ""]

        def init_signal(self) -> None:
            """Signals keep what our own main chose."""

    return LocalEngine

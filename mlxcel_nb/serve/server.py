"""The HTTP server: it listens from `start` to `stop`, on a thread and a loop of its own. Any thread may call."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import uvicorn

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ClusterError, ConfigError
from mlxcel_nb.net.links.sockets import bind
from mlxcel_nb.serve.access import Access
from mlxcel_nb.serve.app import Api
from mlxcel_nb.serve.backlog import MAX_WAIT_S
from mlxcel_nb.serve.connection import HEAD_BYTES, Connection
from mlxcel_nb.serve.served import Served
from mlxcel_nb.util.log import get_logger, trail

log = get_logger("serve.server")

GRACE_S = 5.0
"""Answers under way may take this long to end when the server stops."""

HURRY_S = 0.5
"""Callers are told of the end for so long when nobody wants to wait for them."""

START_S = 10.0


class ApiServer:
    """Serves a cluster's model.

    Args:
        host: an address or name of this computer; beyond loopback `key` is needed.
        port: 0 takes a free one; see `url`.
        certificate, private_key: PEM files; HTTPS with them.
        origins: of web pages that may use it.
        max_wait_s: who would wait longer for his first token is told to come again.

    Raises:
        ConfigError: an option that cannot work; nothing has been opened.
    """

    def __init__(
        self,
        served: Served,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        key: Secret | None = None,
        certificate: str | None = None,
        private_key: str | None = None,
        origins: Sequence[str] = (),
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        self.served = served
        tls = _tls(certificate, private_key)
        self._socket = bind(host, port)
        try:
            address = self._socket.getsockname()
            local = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
            self.access = Access(host, local, key, tuple(origins))
        except BaseException:
            self._socket.close()
            raise
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if tls else ''}://{shown}:{address[1]}"
        self._api = Api(served, self.access, max_wait_s=max_wait_s)
        config = uvicorn.Config(
            self._api.app,
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="critical",
            access_log=False,
            proxy_headers=False,  # who asks is who is connected
            server_header=False,
            h11_max_incomplete_event_size=HEAD_BYTES,
            timeout_graceful_shutdown=int(GRACE_S) + 2,
            ssl_certfile=certificate,
            ssl_keyfile=private_key,
        )
        self._uvicorn = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="serve", daemon=True)
        self._listening = threading.Event()

    def __repr__(self) -> str:
        return f"<ApiServer {self.url}>"

    def start(self) -> Self:
        """Begin to answer.

        Raises:
            ClusterError: the server ended instead.
        """
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        if not self._listening.wait(START_S) or not self._thread.is_alive():
            self.stop()
            raise ClusterError(f"the server at {self.url} did not start", advice="MLXCEL_NB_LOG=info says more.")
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def in_flight(self) -> int:
        """Requests whose answers are under way."""
        return len(self._api.live)

    def leave_cluster(self, why: str) -> None:
        """Say why there are no engines now, and go on. On the loop: no request sees them go in its midst."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self.served.leave, why)

    def hurry(self) -> None:
        """End at once, each with its error, what `stop` waits for. Does not wait; a signal's handler may call."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                self._loop.call_soon_threadsafe(self._end_all, self._loop)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Take no more requests, let answers end for `grace_s` seconds, then end them with an error."""
        self.served.closing = True
        if self._loop is None or not self._thread.is_alive():
            self._socket.close()
            return
        with contextlib.suppress(RuntimeError):  # its loop has ended by itself
            self._loop.call_soon_threadsafe(self._leave, self._loop, grace_s)
        self._thread.join(grace_s + GRACE_S + START_S)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve(loop))
        except Exception as error:  # noqa: BLE001 - the thread's end is what its owner sees
            log.error("the server ended: %s", trail(error))
        finally:
            self._listening.set()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        watching = asyncio.create_task(self.served.watch())
        loop.call_soon(self._listening.set)  # connections wait in the socket's backlog from `bind` on
        try:
            await self._uvicorn.serve(sockets=[self._socket])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _leave(self, loop: asyncio.AbstractEventLoop, grace_s: float) -> None:
        self._uvicorn.should_exit = True
        loop.call_later(grace_s, self._api.stop_all)

    def _end_all(self, loop: asyncio.AbstractEventLoop) -> None:
        self._api.stop_all()
        loop.call_later(HURRY_S, self._cut)

    def _cut(self) -> None:
        """End connections whatever their callers still have to take or to send."""
        for connection in list(self._uvicorn.server_state.connections):
            connection.transport.abort()


def _tls(certificate: str | None, private_key: str | None) -> bool:
    """Whether to speak TLS, after a look at the files.

    Raises:
        ConfigError: one is missing, or they do not fit.
    """
    if certificate is None and private_key is None:
        return False
    if certificate is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    for file in filter(None, (certificate, private_key)):
        if not Path(file).expanduser().is_file():
            raise ConfigError(f"{file} is not there")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, private_key, password=_no_password)
    except (OSError, ValueError) as error:
        what = f"{certificate} and its key cannot be used: {error}"
        raise ConfigError(what, advice="Give PEM files, the key without a password.") from None
    return True


def _no_password() -> str:
    raise ValueError("the key has a password")

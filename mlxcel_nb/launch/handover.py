"""Two requests on the control channel that turn an engine into a node of the cluster.

`mlxcel_hello` gives the engine's public key, made for this purpose alone, and what the engine is; `mlxcel_join`
brings the cluster secret sealed to that key, starts the node and answers with its address. The engine's half
runs on its control thread, the owner's half on the thread that starts the cluster. The control channel is
printed by debug logs and may be read by whoever holds the session key: nothing here travels unsealed that must not.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ClusterError, from_dict, wrap
from mlxcel_nb.launch.compat import Content, ControlHandler, add_control_handler
from mlxcel_nb.wire.sealed import SealedBox, seal_secret

HELLO = "mlxcel_hello"
JOIN = "mlxcel_join"


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """What a node is told besides the secret.

    Args:
        links: what its links are made to be like, as `cluster.shape.parse_links` reads it.
    """

    cluster: str
    node_id: str
    role: str = "hybrid"
    bind: str = "127.0.0.1"
    threads: int = 1
    orphan_guard: bool = True
    links: Sequence[str] = ()


StartNode = Callable[[JoinRequest, Secret], Address]


class EngineSide:
    """The engine's answers. One per process; joins once."""

    def __init__(self, node_id: str, blas: dict[str, Any], start_node: StartNode) -> None:
        self._node_id = node_id
        self._blas = blas
        self._start_node = start_node
        self._box = SealedBox()
        self._joined = False

    def install(self, kernel: Any) -> None:
        """Register both handlers with the engine's kernel."""
        add_control_handler(kernel, HELLO, self.answer_hello)
        add_control_handler(kernel, JOIN, self.answer_join)

    def answer_hello(self, content: Content) -> Content:
        """Who this engine is, and the key to seal the secret to."""
        return self._answer(self._hello, content)

    def answer_join(self, content: Content) -> Content:
        """Open the secret, start the node, and say where it listens."""
        return self._answer(self._join, content)

    def _hello(self, _: Content) -> Content:
        return {
            "node_id": self._node_id,
            "public": base64.b64encode(self._box.public).decode(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "blas": self._blas,
        }

    def _join(self, content: Content) -> Content:
        if self._joined:
            raise ClusterError("this engine has joined a cluster already")
        request = JoinRequest(**content["node"])
        if request.node_id != self._node_id:
            raise ClusterError(f"told to be {request.node_id}, started as {self._node_id}")
        sealed = base64.b64decode(content["sealed"], validate=True)
        secret = Secret(self._box.open(sealed, node_id=request.node_id, cluster=request.cluster))
        self._joined = True
        return {"address": str(self._start_node(request, secret))}

    def _answer(self, handler: ControlHandler, content: Content) -> Content:
        """What `handler` says, or its error: an engine that raised here would leave its owner waiting."""
        try:
            return {"status": "ok", **handler(content)}
        except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
            return {"status": "error", "error": wrap(error, self._node_id).to_dict()}


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """An engine's hello, checked."""

    node_id: str
    public: bytes
    pid: int
    host: str
    blas: dict[str, Any]


def read_hello(node_id: str, content: Content) -> Greeting:
    """The owner's reading of a hello.

    Raises:
        MlxcelError: what the engine reported, or that the answer comes from another engine.
    """
    _raise_if_error(node_id, content)
    if content["node_id"] != node_id:
        raise ClusterError(f"answered as {content['node_id']!r}", node=node_id)
    return Greeting(
        node_id=node_id,
        public=base64.b64decode(content["public"], validate=True),
        pid=int(content["pid"]),
        host=str(content["host"]),
        blas=dict(content["blas"]),
    )


def join_content(greeting: Greeting, secret: Secret, request: JoinRequest) -> Content:
    """The content of a join for the engine that sent `greeting`."""
    sealed = seal_secret(secret, greeting.public, node_id=request.node_id, cluster=request.cluster)
    return {"node": asdict(request), "sealed": base64.b64encode(sealed).decode()}


def read_join(node_id: str, content: Content) -> Address:
    """The address at which the node listens.

    Raises:
        MlxcelError: what the engine reported.
    """
    _raise_if_error(node_id, content)
    return parse_address(str(content["address"]))


def _raise_if_error(node_id: str, content: Content) -> None:
    if content.get("status") == "ok":
        return
    error = content.get("error")
    if isinstance(error, dict):
        raise from_dict(error).at(node_id)
    raise ClusterError(f"{content.get('ename')}: {content.get('evalue')}", node=node_id)  # ipykernel's own form

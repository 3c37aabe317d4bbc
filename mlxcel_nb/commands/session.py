"""What one kernel, or one run of the command line, has going: its clusters and their conversations.

Used from the main thread. Each cluster keeps its own conversation; without a name, commands mean the one started last.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import ClusterError

if TYPE_CHECKING:
    from mlxcel_nb.client.cluster import Cluster
    from mlxcel_nb.serve.server import ApiServer

Message = dict[str, str]


@dataclass
class Conversation:
    """The turns of a chat, in the shape of chat templates."""

    system: str | None = field(default=None, repr=False)
    turns: list[Message] = field(default_factory=list, repr=False)

    def reset(self) -> None:
        self.turns.clear()

    def instruct(self, system: str | None) -> None:
        """Set the system message; another one than before starts the conversation anew."""
        if system != self.system:
            self.system = system or None
            self.reset()

    def ask(self, text: str) -> list[Message]:
        """The messages to send for the next turn; nothing is kept until `keep`."""
        lead = [{"role": "system", "content": self.system}] if self.system else []
        return [*lead, *self.turns, {"role": "user", "content": text}]

    def keep(self, asked: str, answered: str) -> None:
        self.turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]


@dataclass
class Held:
    """A cluster this process started."""

    cluster: Cluster
    conversation: Conversation = field(default_factory=Conversation)

    def check_model(self) -> None:
        """Raise unless a model is loaded: in a notebook the way to one is a command."""
        if self.cluster.model is None:
            raise ClusterError("no model is loaded", advice="Load one: %mlxcel load MODEL")


class Session:
    """The clusters of this process, by name, in the order they were started."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._servers: dict[str, ApiServer] = {}
        self._conversations: weakref.WeakKeyDictionary[Cluster, Conversation] = weakref.WeakKeyDictionary()
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    @property
    def names(self) -> list[str]:
        return list(self._held)

    def start(self, progress: Callable[[str], None] | None = None, *, name: str | None = None, **options: Any) -> Held:
        """Start a cluster; a second one has to be named.

        Raises:
            ClusterError: one is running already.
        """
        if self._held and name is None:
            running = ", ".join(self._held)
            raise ClusterError(
                f"cluster {running} is already running in this notebook",
                advice="Stop it with %mlxcel cluster stop, or give the new one a --name.",
            )
        if name in self._held:
            raise ClusterError(f"cluster {name} is already running in this notebook", advice="Choose another --name.")
        from mlxcel_nb.client.cluster import Cluster

        cluster = Cluster(name=name, **options)
        cluster.start(progress)
        held = Held(cluster)
        self._held[cluster.name] = held
        return held

    def get(self, name: str | None = None) -> Held:
        """The named cluster, or the one started last; those that Python code of this process started come after.

        Raises:
            ClusterError: there is none.
        """
        known = {held.cluster.name: held for held in self._others()} | self._held
        if not known:
            raise ClusterError("no cluster is running", advice="Start one: %mlxcel cluster start -n 2")
        if name is None:
            return next(reversed(known.values()))
        if name not in known:
            raise ClusterError(f"no cluster is called {name}", advice=f"There is {', '.join(known)}.")
        return known[name]

    def _others(self) -> list[Held]:
        """Clusters that Python code of this process started. They are not held here: who drops one stops it."""
        module = sys.modules.get("mlxcel_nb.client.cluster")
        running: list[Cluster] = module.running_clusters() if module else []
        return [
            Held(cluster, self._conversations.setdefault(cluster, Conversation()))
            for cluster in running
            if cluster.name not in self._held
        ]

    def stop(self, name: str | None = None) -> str:
        """Stop one cluster; returns its name. It is forgotten even when stopping fails."""
        held = self.get(name)
        self._held.pop(held.cluster.name, None)
        if server := self._servers.pop(held.cluster.name, None):
            server.stop()
        held.cluster.stop()
        return held.cluster.name

    def stop_all(self) -> list[str]:
        """Stop every cluster, the latest first; the first failure is raised when all were tried."""
        stopped: list[str] = []
        failure: Exception | None = None
        for name in [*reversed(self._held), *(held.cluster.name for held in self._others())]:
            try:
                stopped.append(self.stop(name))
            except Exception as problem:  # noqa: BLE001 - the others must still be stopped
                failure = failure or problem
        if failure:
            raise failure
        return stopped

    def serve(self, held: Held, server: ApiServer) -> None:
        """Keep the server of a cluster, which has one at most; it is stopped with it."""
        self._servers[held.cluster.name] = server

    def check_not_served(self, held: Held) -> None:
        """Raise when the cluster has a server already."""
        server = self._servers.get(held.cluster.name)
        if server is not None and server.running:
            raise ClusterError(f"it is served at {server.url} already", advice="Stop that first: %mlxcel serve stop")

    def stop_serving(self, name: str | None = None) -> str:
        """Stop the server of a cluster, or of the one started last that has one; returns where it was.

        Raises:
            ClusterError: there is none.
        """
        named = name if name is not None else next(reversed(self._servers), None)
        server = self._servers.pop(named, None) if named is not None else None
        if server is None:
            raise ClusterError("nothing is served", advice="Serve the loaded model: %mlxcel serve")
        server.stop()
        return server.url

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.stop_all()


_session: Session | None = None


def current() -> Session:
    """This process's session."""
    global _session
    if _session is None:
        _session = Session()
    return _session

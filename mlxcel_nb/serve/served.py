"""The model that a server gives out: by which names, whether it can be had now, and how its prompts are made.

On the server's loop; what reads files or asks nodes is done on other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcel_nb import __version__
from mlxcel_nb.client.report import ClusterStatus, LoadReport
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.serve import failures
from mlxcel_nb.serve.answers import Token
from mlxcel_nb.serve.failures import ApiError
from mlxcel_nb.serve.prompts import Prompter
from mlxcel_nb.serve.requests import Ask
from mlxcel_nb.serve.tools import Form
from mlxcel_nb.util import times

if TYPE_CHECKING:
    from mlxcel_nb.client.cluster import Cluster

UNKNOWN_LONGEST = 4096
"""Most tokens of an answer that is not limited, by a model of which nobody knows how far it goes."""


class Served:
    """A cluster's model, or the lack of it.

    Args:
        cluster: None as long as there is none, with the reason in `waiting`.
        names: what the model is called in requests; its own name where none are given.

    Attributes:
        status: what the nodes said when they were asked last; None while there is no model.
    """

    def __init__(self, cluster: Cluster | None = None, *, names: Sequence[str] = ()) -> None:
        self.cluster = cluster
        self.waiting = "the engines are starting"
        self.closing = False
        self.created = int(time.time())
        self._names = tuple(names)
        self._prepares: Prompter | None = None
        self.status: ClusterStatus | None = None
        self._trouble = ""

    # -- what there is -----------------------------------------------------------------------------

    @property
    def report(self) -> LoadReport | None:
        """The loaded model; a token has been made with it before it counts as loaded."""
        return self.cluster.model if self.cluster is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call the model; the first is what answers call it."""
        report = self.report
        if self._names or report is None:
            return self._names
        given = report.model
        looks_local = Path(given).is_absolute() or given.startswith((".", "~"))
        return (Path(given).name if looks_local else given,)

    @property
    def fingerprint(self) -> str:
        report = self.report
        return f"mlxcel-nb-{__version__}-{report.layout}-{report.dtype}" if report else f"mlxcel-nb-{__version__}"

    @property
    def longest(self) -> int:
        """Most tokens of one request."""
        report = self.report
        return (report.kv_tokens if report else None) or UNKNOWN_LONGEST

    @property
    def lost(self) -> dict[str, str]:
        """Engines that are lost, and why."""
        return self.cluster.lost if self.cluster is not None else {}

    def problem(self) -> str | None:
        """Why the model cannot be had now, None when it can. Asks nobody, so it answers at once."""
        if self.closing:
            return "the server is stopping"
        cluster = self.cluster
        if cluster is None:
            return self.waiting
        return cluster.problem or self._trouble or None

    def check(self) -> LoadReport:
        """The loaded model.

        Raises:
            ApiError: it cannot be had now.
        """
        problem, report = self.problem(), self.report
        if self.closing:
            raise failures.stopping()
        if problem is not None or report is None:
            raise failures.away(f"the model cannot be had now: {problem}")
        return report

    def check_name(self, name: str | None) -> str:
        """The name that the answer gives; a request need not name the only model there is.

        Raises:
            ApiError: no such model.
        """
        names = self.names
        if name is None or name in names:
            return name or names[0]
        known = ", ".join(names) or "none yet"
        raise ApiError(404, f"there is no model {name!r:.80}, only {known}", param="model", code="model_not_found")

    def leave(self, why: str) -> None:
        """Have no cluster any more, for now."""
        self.waiting = why
        self.cluster = None
        self._trouble = ""

    async def watch(self) -> None:
        """Ask the nodes, while the server runs, how they are and whether what they hold of the model is still good."""
        while True:
            cluster, status = self.cluster, None
            if cluster is not None and self.report is not None:
                with contextlib.suppress(MlxcelError):
                    status = await asyncio.to_thread(cluster.status)
            if cluster is self.cluster:  # else they were asked of one that has been left meanwhile
                self.status = status
                self._trouble = _trouble_of(status)
            await asyncio.sleep(times.HEARTBEAT_S)

    # -- prompts -----------------------------------------------------------------------------------

    async def prepare(self, ask: Ask) -> tuple[list[list[int]], Form | None]:
        """The prompts of a request as token ids, and how calls of its tools are written.

        Raises:
            ApiError: the model's template cannot do what is asked, or refuses; the prompt is far beyond the context.
        """
        report = self.check()
        try:
            return await asyncio.to_thread(self._prompter(report.path).prepare, ask)
        except MlxcelError as error:
            raise ask.failure(error) from None

    def token(self, token: int) -> Token:
        """Of the model that `prepare` was last asked for."""
        return self._prepares.token(token) if self._prepares is not None else Token("", None)

    def _prompter(self, path: str) -> Prompter:
        if self._prepares is None or self._prepares.folder != path:
            self._prepares = Prompter(path)
        return self._prepares


def _trouble_of(status: ClusterStatus | None) -> str:
    problems = [replica.problem for replica in status.replicas] if status else []
    return problems[0] if problems and all(problems) else ""

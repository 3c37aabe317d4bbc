"""A model that a cluster has loaded: its instance on the engines, its leader, and the requests that go there.

Any thread may call. Nodes are not trusted: what they say is checked where it is read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxcel_nb.client import asking, loading
from mlxcel_nb.client.backends import check_backends
from mlxcel_nb.client.loading import Plan
from mlxcel_nb.client.report import Completion, LoadProgress, LoadReport
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.launch.local import EngineInfo
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder
from mlxcel_nb.util import times

if TYPE_CHECKING:
    from mlxcel_nb.client.forcing import Forced

WARM_UP = SamplingParams(max_tokens=1, ignore_eos=True)
"""Ready is said after one real token."""

Explain = Callable[..., MlxcelError]
"""Takes an error, and `loaded`: whether there is a model that has to be unloaded first."""


class Model:
    """What `load` returns. It knows nothing of the cluster, which so is ended as soon as nobody holds it.

    Args:
        explain: makes an error say more, e.g. which signal ended a process, as `losses.explain` does.

    Attributes:
        last: the answer that ended last, of those that are the user's.
    """

    def __init__(self, router: Router, order: LoadOrder, explain: Explain) -> None:
        self._router = router
        self._order = order
        self._explain = explain
        self._aside = False
        self.last: Completion | None = None
        self.report: LoadReport

    def ready(self, report: LoadReport) -> None:
        """It is loaded, and has made a token."""
        self.report = report
        self._explain = partial(self._explain, loaded=True)

    def stream(
        self,
        prompt: str | Sequence[int] | None,
        params: SamplingParams,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
    ) -> Stream:
        """Start a request, as `Cluster.stream` does."""
        return self._begin(
            GenerateOrder(
                id=new_id(),
                instance=self._order.instance,
                params=params,
                prompt=prompt if isinstance(prompt, str) else None,
                token_ids=list(prompt) if prompt is not None and not isinstance(prompt, str) else None,
                messages=messages,
                rank=rank,
            )
        )

    def forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Forced:
        """What every member sees when `tokens` are fed after `prompt`."""
        from mlxcel_nb.client import forcing

        order = forcing.order(self._order.instance, prompt, tokens)
        asking.finish(self._begin(order))
        return forcing.bring(self._router, self.report, order.id, len(tokens), self._order.step_s)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile no answer counts as the last one."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def drop(self) -> None:
        """Free the engines; requests under way are cancelled.

        Raises:
            MlxcelError: the first node that did not do so, after all have been asked.
        """
        loading.drop_parts(self._router, self._order.instance, self._order.step_s)

    def _begin(self, order: GenerateOrder) -> Stream:
        return asking.begin(
            self._router,
            self._order.members[0].node_id,
            order,
            explain=self._explain,
            ended=self._note,
            stall_s=self._order.step_s + times.DEAD_S,
        )

    def _note(self, completion: Completion) -> None:
        if not self._aside:
            self.last = completion


def load(
    router: Router,
    plan: Plan,
    engines: Sequence[EngineInfo],
    *,
    explain: Explain,
    on_progress: Callable[[LoadProgress], None] | None,
    **choices: Any,
) -> Model:
    """Split the model over the first of `engines` that live, and make one token with it.

    Args:
        explain: as `Model` takes it.
        choices: the other fields of the order.

    Raises:
        ConfigError: a split that cannot work on these engines. MlxcelError: a node; all are free again then.
    """
    order = loading.order(router, plan, engines, **choices)
    model = Model(router, order, explain)
    started = time.monotonic()
    try:
        check_backends(router, order, explain)
        loaded = loading.load_parts(router, order, on_progress, explain)
        with model.aside():
            model.stream([0], WARM_UP).result()
    except BaseException:
        with contextlib.suppress(MlxcelError):
            model.drop()
        raise
    model.ready(loading.report(plan, order, loaded, time.monotonic() - started))
    return model

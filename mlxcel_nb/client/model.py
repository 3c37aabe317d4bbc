"""A model that a cluster has loaded: its replicas on the engines, and the requests that go to one of them.

Any thread may call. Nodes are not trusted: what they say is checked where it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxcel_nb.client import asking, joining, loading, transfers
from mlxcel_nb.client.arguments import check_messages, check_params, check_prompt
from mlxcel_nb.client.backends import check_backends
from mlxcel_nb.client.plans import Plan
from mlxcel_nb.client.replicas import Lost, Replica, Replicas
from mlxcel_nb.client.report import Completion, LoadProgress, LoadReport
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.client.stream import Line, Stream
from mlxcel_nb.cluster.roles import AUTO, PREFILL, PREFILL_FROM
from mlxcel_nb.errors import EngineLost, MlxcelError, PeerLost, RequestError
from mlxcel_nb.launch.local import EngineInfo
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder
from mlxcel_nb.scheduling.replicas import PREFIX_AWARE
from mlxcel_nb.util import times

if TYPE_CHECKING:
    from mlxcel_nb.client.forcing import Forced
    from mlxcel_nb.client.saved_kv import KvReport

WARM_UP = SamplingParams(max_tokens=1, ignore_eos=True)
"""Ready is said after one real token."""

Explain = Callable[..., MlxcelError]
"""Takes an error, and `loaded`: whether there is a model that has to be unloaded first."""


class Model:
    """What `load` returns. It knows nothing of the cluster, which so is ended as soon as nobody holds it.

    Args:
        orders: of its replicas.
        explain: makes an error say more, e.g. which signal ended a process, as `losses.explain` does.
        lost: engines that are lost, and why.
        policy: how a copy is chosen for a request.

    Attributes:
        replicas: copies that answer; `readers` are those that read prompts for them, if there are some.
        last: the answer that ended last, of those that are the user's.
        report: of all replicas together.
    """

    def __init__(
        self, router: Router, orders: Sequence[LoadOrder], explain: Explain, lost: Lost, policy: str = PREFIX_AWARE
    ) -> None:
        self._router = router
        self._orders = orders
        self._explain = explain
        self._aside = False
        self._latest: tuple[Replica, str] | None = None
        self.replicas = Replicas(router, [order for order in orders if order.role != PREFILL], lost, policy)
        self.readers = Replicas(router, [order for order in orders if order.role == PREFILL], lost, policy)
        self.last: Completion | None = None
        self.report: LoadReport

    def ready(self, plan: Plan, reports: Sequence[LoadReport]) -> None:
        """Every replica is loaded, and has made a token."""
        told = dict(zip((order.instance for order in self._orders), reports, strict=True))
        for replica in (*self.replicas.all, *self.readers.all):
            replica.report = told[replica.order.instance]
        self.report = loading.joined(plan, reports)
        self._explain = partial(self._explain, loaded=True)

    def warm_up(self) -> None:
        """One real token of every replica, all at once."""
        with self.aside():
            everybody = (*self.readers.all, *self.replicas.all)
            streams = [self._asked(each, _order_of([0], WARM_UP)) for each in everybody]
            for stream in streams:
                stream.result()

    def join(self, digest: str, loaded: loading.Loaded, *, transfer: str, least: int) -> str:
        """Have those that read prompts work for those that answer, and make a token of each pair; how, in words."""
        if not len(self.readers):
            return ""
        dtype = loaded[self.readers.all[0].leader]["dtype"]
        encoding, why = transfers.settle(self._router, self._orders, transfer, dtype)
        joining.join(self._router, self._orders, self._explain, digest=digest, encoding=encoding, least=least)
        with self.aside():
            for reader in self.readers.all:
                order = _order_of([0] * max(1, least), WARM_UP)
                asked = dataclasses.replace(order, readers=[reader.order.instance])
                streams = [self._asked(each, dataclasses.replace(asked, id=new_id())) for each in self.replicas.all]
                for stream in streams:
                    stream.result()
        return f"{encoding}: {why}"

    def stream(
        self,
        prompt: str | Sequence[int] | None,
        params: SamplingParams,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
        caller: str | None = None,
    ) -> Stream:
        """Start a request on the replica that has least to do, as `Cluster.stream` does.

        Should that be lost, another goes on, with the same text.
        """
        order = _order_of(prompt, params.seeded(), messages, rank, caller)

        def again(made: tuple[int, ...]) -> Line:
            return self._place(dataclasses.replace(order, id=new_id(), made=list(made)))

        line = self._place(order)
        return Stream(line, stall_s=self._stall_s, again=again if len(self.replicas) > 1 else None)

    def forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Forced:
        """What every member of a replica sees when `tokens` are fed after `prompt`."""
        from mlxcel_nb.client import forcing

        replica = self.replicas.one()
        order, step_s = forcing.order(replica.order.instance, prompt, tokens), replica.order.step_s
        if not len(self.readers):
            asking.finish(self._asked(replica, order))
            return forcing.bring(self._router, replica.report, order.id, len(tokens), step_s)
        reader = self.readers.one()
        answer = asking.finish(self._asked(replica, dataclasses.replace(order, readers=[reader.order.instance])))
        if answer.handover is None:
            raise EngineLost("the prompt was not read where it was to be", node=reader.leader)
        first = forcing.bring(self._router, reader.report, order.id, 1, step_s)
        if len(tokens) == 1:
            return first
        rest = forcing.bring(self._router, replica.report, order.id, len(tokens) - 1, step_s)
        return forcing.joined(first, rest)

    def save_kv(
        self,
        name: str,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        conversation: Sequence[Mapping[str, str]] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> KvReport:
        """Save what is kept of a prompt, or of the user's last request, as `Cluster.save_kv` does."""
        from mlxcel_nb.client import saved_kv

        if prompt is not None or messages is not None:
            replica, order = self.replicas.one(), _order_of(prompt, WARM_UP, messages)
            with self.aside():
                asking.finish(self._asked(replica, order))
            latest = replica, order.id
        elif self._latest is not None:
            latest = self._latest
        else:
            raise RequestError("nothing has been read yet", advice="Ask something first, or give a prompt.")
        replica, request = latest
        try:
            return saved_kv.save(
                self._router, replica.order, self.report, name, request, messages=conversation, on_progress=on_progress
            )
        except PeerLost as error:
            raise self._explain(error) from None

    def load_kv(self, name: str, *, on_progress: Callable[[int, int], None] | None = None) -> KvReport:
        """Have every replica that works keep what was saved, as `Cluster.load_kv` does."""
        from mlxcel_nb.client import saved_kv

        self.replicas.one()  # or say why there is none
        orders = [each.order for each in self.replicas.all if not each.failure]
        try:
            return saved_kv.load(self._router, orders, self.report, name, on_progress=on_progress)
        except PeerLost as error:
            raise self._explain(error) from None

    def problem(self) -> str:
        """Why no request can be answered any more; "" where one can. Asks nobody."""
        problems = self.replicas.problems()
        return problems[0] if all(problems) else ""

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
        loading.drop_parts(self._router, self._orders, self._orders[0].step_s)

    @property
    def _stall_s(self) -> float:
        return self._orders[0].step_s + times.DEAD_S

    def _asked(self, replica: Replica, order: GenerateOrder) -> Stream:
        """A request of our own to `replica` and nobody else."""
        return Stream(self._ask(replica, order), stall_s=self._stall_s)

    def _place(self, order: GenerateOrder) -> Line:
        """Send a request to the replica that has least to do; it counts there until it is over."""
        while True:
            replica, reader = self.replicas.take(order), self._reader(order)
            asked = order if reader is None else dataclasses.replace(order, readers=self.readers.instances(reader))

            def over(replica: Replica = replica, reader: Replica | None = reader) -> None:
                self.replicas.give_back(replica, order)
                if reader is not None:
                    self.readers.give_back(reader, order)

            try:
                return self._ask(replica, asked, over)
            except (PeerLost, EngineLost):
                if len(self.replicas) == 1:
                    raise  # else it counts as failed, and another is chosen

    def _reader(self, order: GenerateOrder) -> Replica | None:
        """Who is to read the prompt for whoever answers; None where none is left."""
        if not len(self.readers):
            return None
        with contextlib.suppress(EngineLost):
            return self.readers.take(order)
        return None

    def _ask(self, replica: Replica, order: GenerateOrder, over: Callable[[], None] = lambda: None) -> Line:
        def explain(error: MlxcelError) -> MlxcelError:
            told = self._explain(error)
            if isinstance(error, PeerLost):
                replica.failure = replica.failure or f"{told.node or replica.leader}: {told.cause}"
                if left := self.replicas.problems().count(""):
                    others = "The other replica goes on" if left == 1 else f"The other {left} replicas go on"
                    told = type(told)(told.cause, node=told.node, advice=f"{others}: ask again.")
            return told

        return asking.open_line(
            self._router,
            replica.leader,
            dataclasses.replace(order, instance=replica.order.instance),
            explain=explain,
            ended=partial(self._note, (replica, order.id)),
            over=over,
            replica=replica.number if len(self.replicas) > 1 else None,
        )

    def _note(self, request: tuple[Replica, str], completion: Completion) -> None:
        if not self._aside:
            self.last, self._latest = completion, request


def _order_of(
    prompt: str | Sequence[int] | None,
    params: SamplingParams,
    messages: list[dict[str, Any]] | None = None,
    rank: int | None = None,
    caller: str | None = None,
) -> GenerateOrder:
    """An order to whoever takes it.

    Raises:
        RequestError: arguments that are none.
    """
    check_params(params)
    if prompt is not None:
        check_prompt(prompt)
    if messages is not None:
        check_messages(messages)
    return GenerateOrder(
        id=new_id(),
        instance="",  # that of whoever takes it
        params=params,
        prompt=prompt if isinstance(prompt, str) else None,
        token_ids=list(prompt) if prompt is not None and not isinstance(prompt, str) else None,
        messages=messages,
        rank=rank,
        caller=caller,
    )


def load(
    router: Router,
    plan: Plan,
    engines: Sequence[EngineInfo],
    *,
    explain: Explain,
    lost: Lost,
    on_progress: Callable[[LoadProgress], None] | None,
    transfer: str = AUTO,
    least: int = PREFILL_FROM,
    policy: str = PREFIX_AWARE,
    **choices: Any,
) -> Model:
    """Split the model over the first of `engines` that live, and make one token with each replica.

    Args:
        explain, lost: as `Model` takes them.
        transfer: how keys and values travel from groups that read prompts; "auto" measures.
        least: shorter prompts are read where they are answered.
        policy: how a copy is chosen for a request.
        choices: the other fields of the orders.

    Raises:
        ConfigError: a split that cannot work on these engines. MlxcelError: a node; all are free again then.
    """
    orders = loading.orders(router, plan, engines, **choices)
    model = Model(router, orders, explain, lost, policy)
    started = time.monotonic()
    try:
        for order in orders:
            check_backends(router, order, explain)
        loaded, digest = loading.load_parts(router, orders, on_progress, explain)
        model.warm_up()
        words = model.join(digest, loaded, transfer=transfer, least=least)
    except BaseException:
        with contextlib.suppress(MlxcelError):
            model.drop()
        raise
    model.ready(plan, loading.reports(plan, orders, loaded, time.monotonic() - started))
    model.report = dataclasses.replace(model.report, transfer=words)
    return model

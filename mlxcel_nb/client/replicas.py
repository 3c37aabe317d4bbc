"""The replicas of a loaded model: which of them work, what each has to do, and which gets the next request.

Any thread may call. `scheduling.replicas` decides; here is what it goes by: this client's own requests, which it
counts, those of others, which the leaders tell, and who is lost. With a single replica there is nothing to choose, and
nobody is asked.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcel_nb.client.engine_report import figure_of
from mlxcel_nb.client.losses import none_left
from mlxcel_nb.client.report import LoadReport, ReplicaReport
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.cluster.roles import PREFILL
from mlxcel_nb.errors import MlxcelError, printable
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder
from mlxcel_nb.scheduling.replicas import CHARACTERS, PREFIX_AWARE, Prefixes, Standing, choose, keys_of
from mlxcel_nb.scheduling.step_plan import BLOCK

FRESH_S = 1.0
"""What a leader has told counts for so long; then it is asked again, when there is a request to place."""

ANSWER_S = 0.1
"""So long a request waits for leaders to say how busy they are; then it goes by what they said before."""

Lost = Callable[[], Mapping[str, str]]
"""Engines that are lost, and why."""


class Replica:
    """One whole copy of the model: an instance on engines of its own.

    Args:
        number: from 0.

    Attributes:
        report: what its members hold, once it has loaded.
        failure: why no request can run on it ever again; "" where one can.
        ailing: the same as its nodes told last, which may pass.
        requests, tokens: under way, of this client; to be read and to be made, about.
        others: requests of other clients, as its leader told last.
        memory: the share of its room for keys and values that is in use, as its leader told last.
        turn: when it was chosen last, counted in choices.
    """

    def __init__(self, number: int, order: LoadOrder) -> None:
        self.number = number
        self.order = order
        self.report: LoadReport
        self.failure = self.ailing = ""
        self.requests = self.tokens = self.others = self.turn = 0
        self.memory = 0.0

    @property
    def leader(self) -> str:
        return self.order.members[0].node_id

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(member.node_id for member in self.order.members)


class Replicas:
    """All replicas of one model.

    Args:
        lost: never takes back what it has said: an engine that is lost stays so.
        policy: how one is chosen, of `scheduling.replicas.POLICIES`.
    """

    def __init__(self, router: Router, orders: Sequence[LoadOrder], lost: Lost, policy: str = PREFIX_AWARE) -> None:
        self._policy = policy
        self.all = tuple(Replica(number, order) for number, order in enumerate(orders))
        self._router = router
        self._lost = lost
        self._prefixes = Prefixes()
        self._turns = 0
        self._asked_s = float("-inf")
        self._counting = threading.Lock()  # never held while anybody is waited for: the router's loop takes it too
        self._asking = threading.Lock()

    def __len__(self) -> int:
        return len(self.all)

    # -- the choice -------------------------------------------------------------------------------

    def take(self, order: GenerateOrder) -> Replica:
        """The replica that is to answer `order`; it counts there until `give_back`.

        Raises:
            EngineLost: there is none any more.
        """
        keys: list[bytes] = []
        usable = self.all
        if len(self) > 1:
            self._refresh()
            keys = keys_of(_prompt(order))
            usable = self._usable()
        elif self.all[0].order.role == PREFILL:
            usable = self._usable()
        with self._counting:
            standings = {
                each.number: Standing(
                    requests=each.requests + each.others, tokens=each.tokens, turn=each.turn, memory=each.memory
                )
                for each in usable
            }
            replica = self.all[choose(standings, self._prefixes.matched(keys), len(keys), self._policy)]
            self._prefixes.note(keys, replica.number)
            self._turns += 1
            replica.turn = self._turns
            replica.requests += 1
            replica.tokens += _tokens(order)
        return replica

    def give_back(self, replica: Replica, order: GenerateOrder) -> None:
        """The request is over."""
        with self._counting:
            replica.requests -= 1
            replica.tokens -= _tokens(order)

    def instances(self, first: Replica) -> list[str]:
        """What all that work are called, `first` first."""
        problems = self.problems()
        others = [each for each in self.all if each is not first and not problems[each.number]]
        return [each.order.instance for each in (first, *others)]

    def one(self) -> Replica:
        """Any that works.

        Raises:
            EngineLost: there is none any more.
        """
        return self.all[0] if len(self) == 1 else self._usable()[0]

    def _usable(self) -> tuple[Replica, ...]:
        """Those that work, without those whose nodes are silent just now if there are others."""
        problems = self.problems()
        usable = [each for each in self.all if not problems[each.number]]
        if not usable:
            raise none_left(problems, self._lost(), self._router)
        steady = [each for each in usable if all(self._router.state(node)[0] == "alive" for node in each.nodes)]
        return tuple(steady or usable)

    # -- who works --------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Of each replica, why no request can run on it; "" where one can. Asks nobody."""
        lost = self._lost()
        return [
            next((f"{node} is lost: {lost[node]}" for node in each.nodes if node in lost), each.failure or each.ailing)
            for each in self.all
        ]

    def report(self, errors: Mapping[str, str]) -> tuple[ReplicaReport, ...]:
        """What there is to say of each.

        Args:
            errors: what nodes say of themselves that is wrong with their part.
        """
        self._refresh()
        for each in self.all:
            each.ailing = next((f"{node}: {errors[node]}" for node in each.nodes if errors.get(node)), "")
        return tuple(
            ReplicaReport(number=each.number, nodes=each.nodes, problem=problem, requests=each.requests + each.others)
            for each, problem in zip(self.all, self.problems(), strict=True)
        )

    # -- what the leaders tell --------------------------------------------------------------------

    def _refresh(self) -> None:
        """Ask the leaders what they have to do, unless that has been done lately or another thread is at it."""
        if not self._asking.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._asked_s >= FRESH_S:
                self._ask()
                self._asked_s = time.monotonic()
        finally:
            self._asking.release()

    def _ask(self) -> None:
        answers: queue.SimpleQueue[tuple[Replica, dict[str, Any]]] = queue.SimpleQueue()
        asked: list[str] = []
        try:
            for each in self.all:
                with contextlib.suppress(MlxcelError):  # it is lost, which `problems` knows
                    asked.append(request := new_id())
                    self._router.open_inbox(request, lambda _, message, each=each: answers.put((each, message)))  # type: ignore[misc]
                    self._router.send(each.leader, {"type": "status", "id": request})
            end = time.monotonic() + ANSWER_S
            for _ in asked:
                self._heed(*answers.get(timeout=max(0.0, end - time.monotonic())))
        except queue.Empty:
            pass
        finally:
            for request in asked:
                self._router.close_inbox(request)

    def _heed(self, replica: Replica, message: dict[str, Any]) -> None:
        """Take a leader's word for what it is: what has not the form of one changes nothing."""
        told = message.get("status")
        if not isinstance(told, dict):
            return
        requests, error = told.get("requests"), told.get("error")
        with self._counting:
            if type(requests) is int and requests >= 0:
                replica.others = max(0, requests - replica.requests)
            replica.memory = _memory(told)
            replica.ailing = f"{replica.leader}: {printable(error)}" if isinstance(error, str) and error else ""


def _memory(status: dict[str, Any]) -> float:
    """The share of its room that a leader says is in use; 0 where it does not say."""
    work = status.get("work")
    engine = work.get("engine") if isinstance(work, dict) else None
    used, available = figure_of(engine, "kv_used_bytes"), figure_of(engine, "kv_available_bytes")
    return used / available if available > 0 else 0.0


def _prompt(order: GenerateOrder) -> str | Sequence[int] | Sequence[Mapping[str, Any]]:
    if order.messages is not None:
        return order.messages
    return order.prompt if order.prompt is not None else order.token_ids or ()


def _tokens(order: GenerateOrder) -> int:
    """About how many have to be read and made."""
    read = order.weight if order.token_ids is not None else order.weight * BLOCK // CHARACTERS
    return read + order.params.max_tokens

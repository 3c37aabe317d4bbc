"""What a client knows of replicas: its own requests, the leaders' words, and who is lost."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest

from mlxcel_nb.client import replicas as module
from mlxcel_nb.client.replicas import Replicas
from mlxcel_nb.client.router import Router
from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.errors import EngineLost
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, Member

PARAMS = SamplingParams(max_tokens=10)


class Leaders:
    """The router's side of `count` leaders, each alone in its replica, that say what a test has them say."""

    def __init__(self, count: int) -> None:
        self.nodes = [f"engine-{number}" for number in range(count)]
        self.words: dict[str, Any] = {node: {"requests": 0, "error": None} for node in self.nodes}
        self.states = dict.fromkeys(self.nodes, "alive")
        self.lost: dict[str, str] = {}
        self.asked: list[str] = []
        self.open: dict[str, Any] = {}
        orders = [
            LoadOrder(
                id=node, instance=node, model="/m", layout=make_layout(2), dtype="auto", step_s=1.0,
                members=(Member(node_id=node, address="127.0.0.1:1"),),
            )
            for node in self.nodes
        ]  # fmt: skip
        self.replicas = Replicas(cast("Router", self), orders, lambda: self.lost)

    def open_inbox(self, request_id: str, inbox: Any) -> None:
        self.open[request_id] = inbox

    def close_inbox(self, request_id: str) -> None:
        del self.open[request_id]

    def send(self, node: str, message: dict[str, Any]) -> None:
        self.asked.append(node)
        if self.words[node] is not None:
            self.open[message["id"]](node, {"type": "reply", "status": self.words[node]})

    def state(self, node: str) -> tuple[str, str]:
        return self.states[node], ""

    def alive(self) -> list[str]:
        return [node for node in self.nodes if node not in self.lost]

    def say(self, node: str, word: Any) -> None:
        """From now on; the last words are out of date."""
        self.words[node] = word
        self.replicas._asked_s = float("-inf")

    def take(self, first: int = 1) -> int:
        """Where a request goes that is over at once."""
        order = ask(first)
        replica = self.replicas.take(order)
        self.replicas.give_back(replica, order)
        return replica.number


def ask(first: int = 1) -> GenerateOrder:
    return GenerateOrder(id="x", instance="", params=PARAMS, token_ids=[first])


def test_requests_of_others_count_and_our_own_are_not_counted_twice() -> None:
    leaders = Leaders(2)
    taken = [leaders.replicas.take(ask()) for _ in range(6)]
    assert sorted(each.number for each in taken) == [0, 0, 0, 1, 1, 1]
    leaders.say("engine-0", {"requests": 3})
    leaders.say("engine-1", {"requests": 5})
    assert leaders.take() == 0
    assert [each.others for each in leaders.replicas.all] == [0, 2]
    for each in taken:
        leaders.replicas.give_back(each, ask())
    assert [(each.requests, each.tokens) for each in leaders.replicas.all] == [(0, 0), (0, 0)]


@pytest.mark.parametrize(
    "word", [[], "busy", {}, {"requests": "9"}, {"requests": -4}, {"requests": True}, {"error": 7}, {"error": ["x"]}]
)
def test_a_word_that_is_none_changes_nothing(word: Any) -> None:
    leaders = Leaders(2)
    leaders.say("engine-0", word)
    assert sorted([leaders.take(), leaders.take()]) == [0, 1]
    assert leaders.replicas.problems() == ["", ""]


def test_what_ails_a_replica_keeps_requests_away_until_it_has_passed() -> None:
    leaders = Leaders(2)
    leaders.say("engine-0", {"requests": 0, "error": "engine-7: is gone\x1b[2J"})
    assert {leaders.take() for _ in range(4)} == {1}
    assert leaders.replicas.problems() == ["engine-0: engine-7: is gone [2J", ""]
    leaders.say("engine-0", {"requests": 0, "error": ""})
    assert {leaders.take() for _ in range(4)} == {0, 1}


def test_a_replica_that_is_lost_or_has_failed_gets_nothing_and_when_all_have_the_error_names_each() -> None:
    leaders = Leaders(3)
    leaders.lost["engine-2"] = "was killed by SIGKILL"
    leaders.replicas.all[0].failure = "engine-0: its follower is gone"
    assert {leaders.take() for _ in range(5)} == {1}
    leaders.lost["engine-1"] = "ended with exit code 3"
    with pytest.raises(EngineLost) as caught:
        leaders.take()
    assert str(caught.value) == (
        "no replica of the model is left (replica 0: engine-0: its follower is gone; replica 1: engine-1 is lost: ended"
        " with exit code 3; replica 2: engine-2 is lost: was killed by SIGKILL). Unload the model, then load it on the "
        "engine that is left, or stop the cluster and start it again."
    )


def test_silent_nodes_are_passed_by_while_there_are_others() -> None:
    leaders = Leaders(2)
    leaders.states["engine-0"] = "suspect"
    assert {leaders.take() for _ in range(4)} == {1}
    leaders.states["engine-1"] = "suspect"
    assert {leaders.take() for _ in range(4)} == {0, 1}


def test_leaders_are_asked_now_and_then_and_waited_for_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    leaders = Leaders(2)
    for _ in range(10):
        leaders.take()
    assert leaders.asked == ["engine-0", "engine-1"]
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    leaders.say("engine-0", None)
    began = time.monotonic()
    leaders.take()
    assert module.ANSWER_S <= time.monotonic() - began < 5
    assert not leaders.open
    alone = Leaders(1)
    alone.take()
    assert not alone.asked


def test_counts_come_out_even_whatever_threads_do() -> None:
    leaders = Leaders(2)

    def work() -> None:
        for first in range(200):
            leaders.take(first)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(each.requests, each.tokens) for each in leaders.replicas.all] == [(0, 0), (0, 0)]

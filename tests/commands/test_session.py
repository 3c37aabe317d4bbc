"""The clusters and conversations of one process. The start of a real cluster is tested in cells and shells."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_nb.commands.session import Conversation, Held, Session
from mlxcel_nb.errors import ClusterError


class Named:
    """As much of a cluster as a session asks of it."""

    def __init__(self, name: str, fails: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1
        if self.fails:
            raise ClusterError(f"{self.name} would not stop")


def session_of(*clusters: Any) -> Session:
    session = Session()
    session._held = {cluster.name: Held(cluster) for cluster in clusters}
    return session


def test_without_a_cluster_the_way_to_one_is_shown() -> None:
    with pytest.raises(ClusterError, match=r"no cluster is running\. Start one: %mlxcel cluster start -n 2"):
        Session().get()


def test_without_a_model_the_command_that_loads_one_is_named() -> None:
    cluster: Any = Named("a")
    cluster.model = None
    with pytest.raises(ClusterError, match=r"no model is loaded\. Load one: %mlxcel load MODEL"):
        Held(cluster).check_model()


def test_the_latest_is_meant_unless_another_is_named() -> None:
    session = session_of(Named("a"), Named("b"))
    assert session.get().cluster.name == "b"
    assert session.get("a").cluster.name == "a"
    with pytest.raises(ClusterError, match=r"no cluster is called c\. There is a, b"):
        session.get("c")


@pytest.mark.parametrize(("name", "advice"), [(None, "give the new one a --name"), ("a", "Choose another --name")])
def test_a_second_start_is_refused_before_anything_is_started(name: str | None, advice: str) -> None:
    with pytest.raises(ClusterError, match="cluster a is already running in this notebook") as refused:
        session_of(Named("a")).start(name=name)
    assert advice in str(refused.value)


def test_stopping_goes_back_to_the_one_before() -> None:
    session = session_of(Named("a"), Named("b"))
    assert session.stop() == "b"
    assert session.get().cluster.name == "a"
    assert session.stop("a") == "a" and session.names == []


def test_all_are_stopped_even_when_one_fails() -> None:
    clusters = [Named("a"), Named("b", fails=True), Named("c")]
    session = session_of(*clusters)
    with pytest.raises(ClusterError, match="b would not stop"):
        session.stop_all()
    assert [cluster.stopped for cluster in clusters] == [1, 1, 1] and session.names == []
    assert session.stop_all() == []


def test_a_conversation_keeps_finished_turns_alone() -> None:
    talk = Conversation()
    assert talk.ask("one") == [{"role": "user", "content": "one"}]
    assert talk.ask("two") == [{"role": "user", "content": "two"}]
    talk.keep("two", "2")
    assert [m["content"] for m in talk.ask("three")] == ["two", "2", "three"]
    talk.reset()
    assert len(talk.ask("four")) == 1


def test_another_system_message_starts_anew_and_the_same_does_not() -> None:
    talk = Conversation()
    talk.instruct("Be brief.")
    talk.keep("a", "b")
    talk.instruct("Be brief.")
    assert [m["role"] for m in talk.ask("c")] == ["system", "user", "assistant", "user"]
    talk.instruct("Be long.")
    assert [m["content"] for m in talk.ask("c")] == ["Be long.", "c"]
    talk.instruct("")
    assert [m["role"] for m in talk.ask("c")] == ["user"]

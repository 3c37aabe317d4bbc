"""An engine gets the secret sealed to its own key, once, and becomes the node it was started to be."""

from __future__ import annotations

import json

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret, random_secret
from mlxcel_nb.errors import ClusterError, ConfigError, MlxcelError
from mlxcel_nb.launch.handover import EngineSide, Greeting, JoinRequest, join_content, read_hello, read_join

REQUEST = JoinRequest(cluster="c", node_id="engine-0", threads=2)


class Started:
    """What `start_node` was called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[JoinRequest, Secret]] = []
        self._error = error

    def __call__(self, request: JoinRequest, secret: Secret) -> Address:
        if self._error:
            raise self._error
        self.calls.append((request, secret))
        return Address("127.0.0.1", 9000)


def greet(engine: EngineSide, node_id: str = "engine-0") -> Greeting:
    return read_hello(node_id, engine.answer_hello({}))


def test_the_secret_arrives_and_the_address_comes_back() -> None:
    started, secret = Started(), random_secret()
    engine = EngineSide("engine-0", {"name": "OpenBLAS"}, started)
    greeting = greet(engine)
    assert greeting.blas == {"name": "OpenBLAS"}
    content = join_content(greeting, secret, REQUEST)
    assert read_join("engine-0", engine.answer_join(content)) == Address("127.0.0.1", 9000)
    assert started.calls == [(REQUEST, secret)]


def test_what_travels_can_be_read_by_anybody_and_holds_no_secret() -> None:
    secret = Secret(b"canary-secret-of-this-test")
    text = json.dumps(join_content(greet(EngineSide("engine-0", {}, Started())), secret, REQUEST))
    assert "canary" not in text and secret.reveal().hex() not in text


def test_a_second_join_is_refused() -> None:
    engine = EngineSide("engine-0", {}, Started())
    content = join_content(greet(engine), random_secret(), REQUEST)
    engine.answer_join(content)
    with pytest.raises(ClusterError, match="engine-0: this engine has joined"):
        read_join("engine-0", engine.answer_join(content))


def test_a_secret_sealed_to_another_engine_is_not_taken() -> None:
    started = Started()
    engine, other = EngineSide("engine-0", {}, started), EngineSide("engine-0", {}, Started())
    with pytest.raises(MlxcelError, match="engine-0"):
        read_join("engine-0", engine.answer_join(join_content(greet(other), random_secret(), REQUEST)))
    assert started.calls == []


def test_an_engine_takes_no_other_name_than_the_one_it_was_started_with() -> None:
    engine = EngineSide("engine-1", {}, Started())
    content = join_content(greet(engine, "engine-1"), random_secret(), REQUEST)
    with pytest.raises(ClusterError, match="told to be engine-0, started as engine-1"):
        read_join("engine-1", engine.answer_join(content))


def test_an_answer_of_another_engine_is_not_taken_for_its() -> None:
    with pytest.raises(ClusterError, match="answered as 'engine-1'"):
        greet(EngineSide("engine-1", {}, Started()), "engine-0")


def test_a_node_that_cannot_start_is_an_error_that_names_it() -> None:
    engine = EngineSide("engine-0", {}, Started(ConfigError("port 9000 in use by pid 7")))
    with pytest.raises(ConfigError, match="engine-0: port 9000 in use by pid 7"):
        read_join("engine-0", engine.answer_join(join_content(greet(engine), random_secret(), REQUEST)))


def test_a_nonsense_request_is_an_answer_not_silence() -> None:
    with pytest.raises(MlxcelError, match="engine-0"):
        read_join("engine-0", EngineSide("engine-0", {}, Started()).answer_join({}))

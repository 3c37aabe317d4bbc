"""Questions over control links: an answer counts once, by its id, and from the node that was asked."""

from __future__ import annotations

import pytest

from mlxcel_nb.errors import ConfigError, MlxcelError, PeerLost
from mlxcel_nb.net.control.questions import Message, Questions, unless_error
from tests.net.helpers import control_pair, run


def test_each_answer_finds_its_question() -> None:
    async def case() -> None:
        async with control_pair() as (ours, theirs):
            questions = Questions()
            with questions.ask(ours.link, {"type": "status"}) as one, questions.ask(ours.link, {"n": 2}) as other:
                first, second = await theirs.messages.get(), await theirs.messages.get()
                assert first["id"] != second["id"] and second["n"] == 2
                for asked in (second, first):
                    theirs.link.send({"type": "reply", "id": asked["id"], "to": asked["id"]})
                    assert questions.take(ours.link, await ours.messages.get())
                assert (await one)["to"] == first["id"] and (await other)["to"] == second["id"]
            late = {"type": "reply", "id": first["id"]}
            assert not questions.take(ours.link, late), "nobody waits for it any more"

    run(case())


def test_only_the_node_that_was_asked_can_answer_and_only_with_an_answer() -> None:
    async def case() -> None:
        async with control_pair() as (ours, theirs):
            questions = Questions()
            with questions.ask(ours.link, {"type": "status"}) as answer:
                question = (await theirs.messages.get())["id"]
                assert not questions.take(theirs.link, {"type": "reply", "id": question})
                assert not questions.take(ours.link, {"type": "heartbeat", "id": question})
                assert not questions.take(ours.link, {"type": "reply", "id": None})
                assert not answer.done()

    run(case())


def test_a_node_that_is_lost_fails_its_own_questions_alone() -> None:
    async def case() -> None:
        async with control_pair() as (ours, theirs):
            questions = Questions()
            with questions.ask(ours.link, {}) as mine, questions.ask(theirs.link, {}) as its:
                questions.fail(PeerLost("is gone"), ours.link.peer.node_id)
                with pytest.raises(PeerLost, match="is gone"):
                    await mine
                assert not its.done()
                questions.fail(PeerLost("this node stops"))
                with pytest.raises(PeerLost, match="stops"):
                    await its

    run(case())


@pytest.mark.parametrize(
    ("answer", "raises"),
    [
        ({"type": "error", "error": {"code": "config", "cause": "so not"}}, ConfigError),
        ({"type": "error", "error": "bent"}, MlxcelError),
        ({"type": "error"}, MlxcelError),
    ],
)
def test_an_answer_that_is_an_error_is_raised(answer: Message, raises: type[MlxcelError]) -> None:
    with pytest.raises(raises):
        unless_error(answer)
    assert unless_error({"type": "reply"}) == {"type": "reply"}

"""Neither asyncio nor a foreign exception puts a prompt into a log."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest

import mlxcel_nb
from mlxcel_nb.client.router import Router
from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.session import Conversation
from mlxcel_nb.errors import WireError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder
from mlxcel_nb.scheduling.sequence import Request
from mlxcel_nb.scheduling.step_plan import Chunk, Open, Work
from mlxcel_nb.util.log import trail
from mlxcel_nb.util.loop import LoopThread
from tests.waiting import until

PROMPT = "Quzzlewick"
LOGGING = {"debug", "info", "warning", "error", "critical", "log"}


def test_a_callback_that_fails_or_is_slow_is_logged_without_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    loop = LoopThread("test")
    loop.loop.set_debug(True)
    loop.loop.slow_callback_duration = 0.0
    with caplog.at_level(logging.DEBUG, "asyncio"):
        loop.soon(lambda message: message["absent"], {"prompt": PROMPT})
        assert until(lambda: "Exception in callback" in caplog.text and "Executing" in caplog.text)
        loop.close()
    assert PROMPT not in caplog.text


def test_a_trail_names_type_and_places_but_not_what_the_error_quotes() -> None:
    try:
        int(PROMPT)
    except ValueError as error:
        said = trail(error)
    assert said.startswith("ValueError, from")
    assert Path(__file__).name in said
    assert PROMPT not in said.replace("int(PROMPT)", "")


def test_no_module_logs_an_exception_with_its_message() -> None:
    for path in Path(str(mlxcel_nb.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "exception" or not node.args, f"{path}:{node.lineno}"
                if node.func.attr in LOGGING:
                    assert "exc_info" not in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


def test_what_holds_a_prompt_does_not_show_it() -> None:
    params = SamplingParams()
    talk = Conversation()
    talk.instruct(PROMPT)
    talk.keep(PROMPT, PROMPT)
    holders = [
        GenerateOrder(id="r", instance="i", params=params, prompt=PROMPT),
        GenerateOrder(id="r", instance="i", params=params, messages=[{"role": "user", "content": PROMPT}]),
        GenerateOrder(id="r", instance="i", params=params, token_ids=[31337]),
        Work(0, -1, (), (Chunk(1, 1, False),), (31337,)),
        Open(1, {}, (31337,), 0),
        Request(prompt=(31337,), max_tokens=1),
        Context(None, None, prompt=PROMPT, names={"x": PROMPT}),
        talk,
    ]
    assert not [holder for holder in holders if PROMPT in repr(holder) or "31337" in repr(holder)]


@pytest.mark.parametrize("message", [{"prompt": PROMPT * 500_000}, {"prompt": "\ud800"}, {"token_ids": [object()]}])
def test_a_request_that_cannot_travel_is_an_error_where_it_was_made(message: dict[str, object]) -> None:
    """Packed on the loop, it would be a line in asyncio's log, and an answer that never comes."""
    router = Router("here", random_secret())
    router._links["engine-0"] = None  # type: ignore[assignment]  # never reached
    try:
        with pytest.raises(WireError) as caught:
            router.send("engine-0", {"type": "generate", "id": "r", **message})
    finally:
        router._links.clear()
        router.close()
    assert PROMPT not in str(caught.value)

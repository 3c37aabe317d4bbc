"""Tools over HTTP, with a model whose chat template knows them: what it is shown, and how its calls come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer
from tests.cluster.harness import nothing_left
from tests.tiny import make_tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "Write <tool_call>{...}</tool_call>.{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments.city }}{% endfor %}\n{% endfor %}"
    "{% if shouting %}LOUD{% endif %}assistant:"
)
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ASKED: Any = [{"role": "user", "content": "Is it raining in Paris?"}]
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
SAID = f"<tool_call>{json.dumps(CALL)}</tool_call>"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = make_tiny(tmp_path_factory.mktemp("models") / "tools")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}), "utf-8")
    with nothing_left(Cluster(1)) as cluster:
        cluster.load(str(folder))
        with ApiServer(Served(cluster, names=["tools"]), port=0) as server:
            url = f"{server.url}/v1"
            with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=90) as client:
                yield client


def held_to(text: str) -> dict[str, Any]:
    """A model of random weights says what is wanted of it when nothing else is allowed."""
    escaped = "".join(f"\\{char}" if char in "\\^$.|?*+()[]{}/" else char for char in text)
    return {"regex": escaped}


def test_a_call_is_told_from_text(client: OpenAI) -> None:
    body = held_to(f"Let me look.{SAID}")
    done = client.chat.completions.create(
        model="tools", messages=ASKED, tools=[WEATHER], temperature=0, max_tokens=200, extra_body=body
    )
    choice = done.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    assert choice.message.tool_calls is not None
    function = choice.message.tool_calls[0].to_dict()["function"]
    assert function == {"name": "weather", "arguments": json.dumps(CALL["arguments"])}


def test_a_stream_has_the_call_whole(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tools", messages=ASKED, tools=[WEATHER], temperature=0, max_tokens=200, stream=True,
            extra_body=held_to(f"So:{SAID}{SAID}"),
        )
    )  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "So:"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
    assert all(call.function and json.loads(call.function.arguments or "") == CALL["arguments"] for call in calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_template_is_shown_tools_calls_and_their_results(client: OpenAI) -> None:
    def tokens(messages: Any, **more: Any) -> int:
        done = client.chat.completions.create(model="tools", messages=messages, max_tokens=0, **more)
        assert done.usage is not None
        return done.usage.prompt_tokens

    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
    plain = tokens(ASKED)
    assert tokens(ASKED, tools=[WEATHER]) > plain
    assert tokens(ASKED, tools=[WEATHER], tool_choice="none") == plain
    said = [{"role": "assistant", "content": "Paris"}, {"role": "tool", "content": "rain"}]
    assert tokens([*ASKED, *turns]) == tokens([*ASKED, *said]) > plain
    assert tokens(ASKED, extra_body={"chat_template_kwargs": {"shouting": True}}) > plain


@pytest.mark.parametrize("name", ["quiet", "messages", "add_generation_prompt", "eos_token"])
def test_only_variables_that_the_template_has_can_be_set(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tools", messages=ASKED, max_tokens=1, extra_body={"chat_template_kwargs": {name: "x"}}
        )
    assert caught.value.param == name


def test_a_template_that_refuses_is_the_callers_error(client: OpenAI, tmp_path: Path) -> None:
    """Case 21: as a 400, with the template's own words."""
    folder = make_tiny(tmp_path / "strict")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    refuses = "{{ raise_exception('roles must alternate') }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": refuses}), "utf-8")
    with nothing_left(Cluster(1)) as cluster:
        cluster.load(str(folder))
        with ApiServer(Served(cluster), port=0) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x") as strict:
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                strict.chat.completions.create(model="strict", messages=ASKED)
            assert strict.completions.create(model="strict", prompt="x", max_tokens=1).choices

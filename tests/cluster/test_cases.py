"""Cases that need whole engines and share two of them: sampling, text, threads, stops, readiness, files, code."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client import plans
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.llm import LLM
from mlxcel_nb.errors import MlxcelError, ModelError, NodeFailed, RequestError
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import draw, nothing_left, on_engine, pid_of, wait_until
from tests.tiny import make_tiny

ENGINES = ("engine-0", "engine-1")
LAYOUTS = [{"tp": 2}, {"pp": 2}]
HOT = 30.0
"""Tiny echoes its last token with great certainty; this much heat makes every token likely."""
WARM = SamplingParams(temperature=HOT, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        yield cluster


@pytest.fixture(params=LAYOUTS, ids=["tp2", "pp2"])
def loaded(request: pytest.FixtureRequest, engines: Cluster, tiny: str) -> Iterator[Cluster]:
    """The module's engines with tiny on them."""
    engines.load(tiny, **request.param)
    yield engines
    engines.unload()


def record() -> None:
    """On an engine: keep the ids that every decode step is fed, and every token that is drawn, from now on."""
    from mlxcel_nb.runtime import execution

    module: Any = execution
    if not hasattr(module, "fed"):
        run, sample = execution.Execution.run, module.sample_rows

        def recorded_run(self: Any, plan: Any, recording: Any = None) -> Any:
            module.fed.extend((self.epoch, plan.step, work.tokens) for work in plan.work if work.rows)
            return run(self, plan, recording)

        def recorded_sample(samplers: Any, logits: Any) -> Any:
            sampled = sample(samplers, logits)
            module.drawn.extend(each.token for each in sampled)
            return sampled

        execution.Execution.run, module.sample_rows = recorded_run, recorded_sample  # type: ignore[method-assign]
    module.fed, module.drawn = [], []


def recorded() -> tuple[list[tuple[int, int, tuple[int, ...]]], list[int]]:
    from mlxcel_nb.runtime import execution

    module: Any = execution
    return module.fed, module.drawn


def test_every_rank_runs_the_tokens_that_were_drawn_also_after_a_cancelled_request(loaded: Cluster) -> None:
    """Case 13: tensor ranks all run the same; of two stages the first is fed what the last one drew."""
    for node in ENGINES:
        on_engine(loaded, node, record)
    stream = loaded.stream("first", replace(WARM, max_tokens=2000))  # seconds: it must not end before the cancel
    wait_until(lambda: stream.next(1.0), deadline_s=10, what="the first text")
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    answer = loaded.generate("second", WARM)
    assert answer.generation_tokens == 200
    (fed, drawn), (fed_1, drawn_1) = (on_engine(loaded, node, recorded) for node in ENGINES)
    assert loaded.model is not None
    two_stages = loaded.model.layout == "pp2"
    assert (drawn_1 if two_stages else drawn)[-200:] == list(answer.token_ids)
    assert (drawn if two_stages else drawn_1) == [], "one place samples"
    assert [ids for _, _, ids in fed][-199:] == [(token,) for token in answer.token_ids[:-1]]
    told = [(epoch, step, () if two_stages else ids) for epoch, step, ids in fed]
    assert fed_1[-199:] == told[-199:]


def test_a_seed_repeats_the_text_and_no_seed_does_not(loaded: Cluster) -> None:
    """Case 14."""
    seeded = SamplingParams(temperature=HOT, max_tokens=40, seed=11, ignore_eos=True)
    free = SamplingParams(temperature=HOT, max_tokens=40, ignore_eos=True)
    assert loaded.generate("x", seeded).token_ids == loaded.generate("x", seeded).token_ids
    assert loaded.generate("x", free).token_ids != loaded.generate("x", free).token_ids


def test_an_answer_has_the_form_and_the_end_that_are_asked_for(loaded: Cluster) -> None:
    ask = SamplingParams(temperature=HOT, seed=3, max_tokens=200)
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, "é"]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = loaded.generate("x", replace(ask, json_schema=schema))
    assert json.loads(answer.text)["n"] in (1, "é")
    assert answer.finish_reason == "stop"
    assert re.fullmatch("[a-f]{9}", loaded.generate("x", replace(ask, regex="[a-f]{9}")).text)
    for wrong, why in (({"regex": "((("}, "unclosed group"), ({"logit_bias": {257: 1}}, "token 257, which is outside")):
        with pytest.raises(RequestError, match=why):
            loaded.generate("x", replace(ask, **wrong))
    ends = SamplingParams(logit_bias={65: 100}, stop_token_ids=(65,), max_tokens=9)
    for least in (0, 4):
        answer = loaded.generate("x", replace(ends, min_tokens=least))
        assert (answer.finish_reason, answer.generation_tokens) == ("stop", least + 1)
        assert len(answer.token_ids) == least and 65 not in answer.token_ids
    answer = loaded.generate("x", SamplingParams(logit_bias={65: 100}, stop="A", min_tokens=3, max_tokens=9))
    assert (answer.text, answer.finish_reason) == ("AA", "stop")


def test_any_thread_may_ask(loaded: Cluster) -> None:
    """Case 15: loaded in one thread, asked from a second, a third, and the first again."""
    ask = SamplingParams(max_tokens=20, ignore_eos=True)
    answers = []

    def run() -> None:
        answers.append(loaded.generate("thread", ask).token_ids)

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
    run()
    assert len(answers) == 3 and len(set(answers)) == 1


TEXT = "🙂 汉字 é 👩‍👩‍👧"


@pytest.fixture
def drawing(loaded: Cluster) -> Iterator[Callable[[bytes], None]]:
    """Makes whoever samples draw the bytes of a text: tiny's tokens are bytes."""
    assert loaded.model is not None
    sampler = "engine-1" if loaded.model.layout == "pp2" else "engine-0"
    yield lambda text: on_engine(loaded, sampler, draw, list(text))
    on_engine(loaded, sampler, draw, [])


def test_characters_come_whole_from_tokens_that_are_bytes(loaded: Cluster, drawing: Callable[[bytes], None]) -> None:
    """Case 16."""
    drawing(TEXT.encode())
    stream = loaded.stream("say", SamplingParams(max_tokens=len(TEXT.encode())))
    deltas = [delta.text for delta in stream]
    assert deltas == list(TEXT)
    assert stream.result().token_ids == tuple(TEXT.encode())


def test_a_character_that_max_tokens_cuts_is_flushed_once(loaded: Cluster, drawing: Callable[[bytes], None]) -> None:
    """Case 16."""
    data = TEXT.encode()
    for length in range(1, len(data)):
        drawing(data)
        stream = loaded.stream("say", SamplingParams(max_tokens=length))
        deltas = [delta.text for delta in stream]
        answer = stream.result()
        assert (answer.token_ids, answer.finish_reason) == (tuple(data[:length]), "length")
        assert "".join(deltas) == answer.text == data[:length].decode("utf-8", "replace")
        assert "\ufffd" not in "".join(deltas[:-1]) and "" not in deltas
        assert deltas[-1].count("\ufffd") == (not TEXT.startswith(answer.text))


@pytest.mark.parametrize(
    ("says", "shown", "stop"),
    [
        ("one\ntwo</answer>three\n\nfour", "one\ntwo", "</answer>"),
        ("one\n\ntwo</answer>", "one", "\n\n"),
        ("one</answe\n\n", "one</answe", "\n\n"),
    ],
)
def test_the_first_of_two_stop_strings_cuts(
    loaded: Cluster, drawing: Callable[[bytes], None], says: str, shown: str, stop: str
) -> None:
    """Case 18, in tokens of one character."""
    drawing(says.encode())
    ask = SamplingParams(max_tokens=len(says), stop=("\n\n", "</answer>"))
    stream = loaded.stream("say", ask)
    assert "".join(delta.text for delta in stream) == shown
    answer = stream.result()
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (shown, "stop", stop)


@pytest.mark.parametrize("stop", [("",), (3,), ("fine", None), 7, [b"bytes"]], ids=repr)
def test_a_stop_that_is_no_text_or_empty_is_refused_here_and_by_the_engine(loaded: Cluster, stop: Any) -> None:
    """Case 18: by an engine as well, whose other clients may not look."""
    with pytest.raises(RequestError, match="stop must be non-empty strings"):
        SamplingParams(stop=stop)
    ask = SamplingParams(max_tokens=2, ignore_eos=True)
    unchecked = replace(ask)
    object.__setattr__(unchecked, "to_dict", lambda: {**ask.to_dict(), "stop": stop})
    with pytest.raises(RequestError, match="engine-0: stop must be non-empty strings"):
        loaded.generate("x", unchecked)
    assert loaded.generate("x", ask).generation_tokens == 2


def test_an_interrupt_at_the_moment_of_asking_ends_the_request(
    loaded: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody has the stream yet who could cancel it, and the traceback holds on to it."""
    assert loaded.model is not None
    sampler = "engine-1" if loaded.model.layout == "pp2" else "engine-0"
    on_engine(loaded, sampler, record)
    router = loaded._running()
    send = router.send

    def interrupted(node_id: str, message: dict[str, Any]) -> None:
        send(node_id, message)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(router, "send", interrupted)
    with pytest.raises(KeyboardInterrupt) as held:
        loaded.generate([7], SamplingParams(max_tokens=2000, ignore_eos=True))
    assert loaded.generate("next", SamplingParams(max_tokens=2, ignore_eos=True)).generation_tokens == 2
    _, drawn = on_engine(loaded, sampler, recorded)
    assert len(drawn) < 2000 and held.tb is not None


def test_the_smallest_requests_are_answered_or_refused_and_the_next_one_works(loaded: Cluster) -> None:
    """Case 19."""
    ask = SamplingParams(max_tokens=4, ignore_eos=True)
    whole = loaded.generate("next", ask).token_ids
    none = loaded.generate("next", SamplingParams(max_tokens=0))
    assert (none.text, none.token_ids, none.finish_reason) == ("", (), "length")
    one = loaded.generate("next", SamplingParams(max_tokens=1, ignore_eos=True))
    assert one.token_ids == whole[:1] and one.finish_reason == "length"
    for prompt in ("", []):
        with pytest.raises(RequestError, match="empty"):
            loaded.generate(prompt, ask)
    with pytest.raises(RequestError, match="empty"):
        loaded.generate(messages=[], params=ask)
    assert loaded.generate("   ", ask).generation_tokens == 4
    assert loaded.generate("next", ask).token_ids == whole


@pytest.mark.parametrize("prompts", [[""], ["fine", ""], [[]]], ids=repr)
def test_an_empty_prompt_among_several_is_a_clear_error(engines: Cluster, tiny: str, prompts: list[Any]) -> None:
    """Case 19, as the `LLM` of a user meets it."""
    ask = SamplingParams(max_tokens=2, ignore_eos=True)
    with LLM(tiny, pipeline_parallel_size=2, cluster=engines) as llm:
        with pytest.raises(RequestError, match=r"the prompt is empty\. Give it at least one token"):
            llm.generate(prompts, ask)
        with pytest.raises(RequestError, match="the list of messages is empty"):
            llm.chat([], ask)
        assert [answer.generation_tokens for answer in llm.generate(["next", "   "], ask)] == [2, 2]


def test_prompts_up_to_the_context_run_and_longer_ones_are_refused_before_any_rank(loaded: Cluster) -> None:
    """Case 20, of which the model's context is 2048 tokens."""
    ask = SamplingParams(max_tokens=2, ignore_eos=True)
    assert loaded.generate([7] * 2047, ask).generation_tokens == 2
    assert loaded.generate([7] * 2048, ask).generation_tokens == 1
    for length in (2049, 20480):
        with pytest.raises(RequestError, match=f"{length} tokens, the model's context is 2048"):
            loaded.generate([7] * length, ask)
    assert loaded.generate("next", ask).generation_tokens == 2


def test_a_stop_string_ends_the_text_where_it_begins(loaded: Cluster) -> None:
    """Case 18, end to end: whatever the model says, its own third character on is made a stop."""
    ask = SamplingParams(max_tokens=40, ignore_eos=True, temperature=HOT, seed=5)
    text = loaded.generate("stop", ask).text
    stop = text[5:7]
    cut = loaded.generate("stop", replace(ask, stop=(stop,)))
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_ready_is_said_only_after_a_token(engines: Cluster, tiny: str) -> None:
    """Case 33: a model that loads but cannot make a token does not become ready."""
    on_engine(engines, "engine-1", break_next_part)
    with pytest.raises(NodeFailed, match="engine-1: ZeroDivisionError"):
        engines.load(tiny, pp=2)
    assert engines.model is None
    engines.load(tiny, pp=2)
    assert engines.generate("works", SamplingParams(max_tokens=2, ignore_eos=True)).generation_tokens == 2
    engines.unload()


def break_next_part() -> None:
    """On an engine: the next part that is loaded raises at its first step."""
    import importlib

    loading: Any = importlib.import_module("mlxcel_nb.runtime.loading")
    load_part = loading.load_part

    def broken(*args: Any, **kwargs: Any) -> Any:
        loading.load_part = load_part
        part = load_part(*args, **kwargs)
        forward = part.forward

        def once(*_: Any, **__: Any) -> Any:
            part.forward = forward
            raise ZeroDivisionError("cannot make a token")

        part.forward = once
        return part

    loading.load_part = broken


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_file_broken_on_a_node_is_named_with_the_node(
    damage: str, engines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 44: the files went bad after the notebook looked at them."""
    folder = make_tiny(tmp_path / "tiny")
    plan = plans.prepare(str(folder), pp=2)
    monkeypatch.setattr(plans, "prepare", lambda _model, **_options: plan)
    weights = folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"^engine-[01]: .*"):
        engines.load(str(folder), pp=2)


OWN_CODE = """
import os
from pathlib import Path

from mlx_lm.models.llama import Model as Llama, ModelArgs

Path(__file__).with_name("ran").write_text(str(os.getpid()))


class Model(Llama):
    pass
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """Tiny, as a folder that wants its own Python code."""
    folder = make_tiny(tmp_path / "own", model_file="own.py")
    (folder / "own.py").write_text(OWN_CODE)
    return folder


def test_a_model_s_own_code_runs_only_when_the_user_allows_it(engines: Cluster, tiny: str, own_code: Path) -> None:
    """Case 65: refused in a line that names the flag; allowed, it runs in the engine and nowhere else."""
    with pytest.raises(ModelError, match=r"own Python code \(own\.py\).*--allow-code") as caught:
        engines.load(str(own_code))
    assert len(caught.value.lines()) == 1
    assert not (own_code / "ran").exists()
    ask = SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(str(own_code), cluster=engines, allow_code=True) as llm:
        assert (own_code / "ran").read_text() == str(pid_of(engines, "engine-0"))
        assert llm.report.warnings == ("the model runs Python code of its own (own.py)",)
        (answer,) = llm.generate("same", ask)
    with LLM(tiny, cluster=engines) as llm:
        assert llm.generate("same", ask)[0].token_ids == answer.token_ids


def test_an_engine_refuses_code_by_itself(engines: Cluster, own_code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 65: whatever the notebook looked at."""
    plan = plans.prepare(str(own_code), allow_code=True)
    monkeypatch.setattr(plans, "prepare", lambda _model, **_options: plan)
    with pytest.raises(ModelError, match=r"^engine-0: .*own Python code"):
        engines.load(str(own_code))
    assert not (own_code / "ran").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tp": 2}, "no tensor plan for a model that is Python code of its own"),
        ({"pp": 2}, "no pipeline stages for model type own.py, which is Python code of its own"),
        ({"config": {"model_file": "../own.py"}}, "'../own.py' is not the name of a Python file in the folder"),
        ({"config": {"model_file": ["own.py"]}}, "is not the name of a Python file"),
        ({"config": {"model_file": "absent.py"}}, "absent.py is missing: this model is Python code of its own"),
        ({"code": "x = 1"}, "own.py has no Model and ModelArgs"),
        ({"code": "import no_such_module"}, "ModuleNotFoundError: No module named 'no_such_module'"),
        ({"code": "raise SystemExit('out')"}, "own.py ended with SystemExit"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_code_that_cannot_be_a_model_is_one_error_and_the_engine_lives(
    engines: Cluster, own_code: Path, change: dict[str, Any], says: str
) -> None:
    """Case 65."""
    if config := change.pop("config", None):
        make_tiny(own_code, **config)
    (own_code / "own.py").write_text(change.pop("code", OWN_CODE))
    with pytest.raises(MlxcelError, match=re.escape(says)):
        engines.load(str(own_code), allow_code=True, **change)
    assert set(engines._running().alive()) == set(ENGINES)

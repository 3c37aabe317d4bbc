"""A stream ends exactly once, whatever its messages and its nodes do."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest

from mlxcel_nb.client.report import Completion, Likelihood
from mlxcel_nb.client.stream import Inbox, Line, Stream
from mlxcel_nb.errors import EngineLost, MlxcelError, NodeFailed, PeerLost, WireError


class Wire:
    """A stream whose messages the test writes itself."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.closed = 0
        self.completions: list[Completion] = []
        self.inbox = Inbox("engine-0", self._close)
        self.line = Line(self.inbox, self._cancel, lambda: 0, self._explain, self.completions.append)
        self.stream = Stream(self.line, stall_s=1.0)

    def _cancel(self) -> None:
        self.cancelled += 1

    def _close(self) -> None:
        self.closed += 1

    @staticmethod
    def _explain(error: MlxcelError) -> MlxcelError:
        return EngineLost("ended by SIGKILL", node=error.node) if isinstance(error, PeerLost) else error

    def say(self, kind: str, seq: int, text: str = "", tokens: tuple[int, ...] = (), **more: Any) -> None:
        message = {"type": kind, "seq": seq, "text": text, "tokens": list(tokens), **more}
        self.inbox.put("engine-0", message)


def test_deltas_add_up_to_the_completion() -> None:
    wire = Wire()
    wire.say("delta", 0, "Hello", (1, 2))
    wire.say("delta", 1, ", you", (3,))
    wire.say("end", 2, "!", (4,), finish_reason="length", usage={"prompt_tokens": 5, "generation_tokens": 4})
    assert [d.text for d in wire.stream] == ["Hello", ", you", "!"]
    done = wire.stream.completion
    assert done is not None
    assert (done.text, done.token_ids, done.finish_reason) == ("Hello, you!", (1, 2, 3, 4), "length")
    assert (done.prompt_tokens, done.generation_tokens) == (5, 4)
    assert wire.closed == 1


def test_likelihoods_come_with_their_tokens() -> None:
    wire = Wire()
    wire.say("delta", 0, "Hi", (1, 2), logprobs=[[-0.5, [1, 7], [-0.5, -2.0]], [-1.0, [], []]])
    wire.say("end", 1, "!", (4,), finish_reason="stop", logprobs=[[-3.0, [], []]])
    (first, last), done = list(wire.stream), wire.stream.completion
    assert first.logprobs == (Likelihood(-0.5, ((1, -0.5), (7, -2.0))), Likelihood(-1.0))
    assert done is not None and done.logprobs == first.logprobs + last.logprobs
    assert len(done.logprobs) == len(done.token_ids)


def test_a_completion_is_its_text_and_its_figures_are_a_line() -> None:
    done = Completion(text="<b>Paris</b>\nis " + "far " * 30, token_ids=(1,), finish_reason="stop", generation_tokens=1)
    assert str(done) == done.text
    assert "\n" not in repr(done) and repr(done).endswith("...': 1 token · stop>")
    shown = done._repr_mimebundle_()
    assert shown["text/plain"] == f"{done.text}\n1 token · stop"
    assert "&lt;b&gt;Paris" in shown["text/html"] and "<b>" not in shown["text/html"]


def test_what_was_read_elsewhere_says_where_the_time_went() -> None:
    """Queue, reading, what came after it, and the first step here: in the figures, and one by one."""
    wire = Wire()
    told = {"prefill_s": 1.9, "transfer_s": 0.004, "decode_s": 0.06, "transfer_sent_bytes": 27_700_000, "of_later": 1}
    wire.say("delta", 0, "a", (1,))
    timings = {"queue_s": 0.42, "ttft_s": 2.32}
    wire.say("end", 1, "", (), finish_reason="stop", timings=timings, handoff=told, usage={"generation_tokens": 9})
    list(wire.stream)
    done = wire.stream.completion
    assert done is not None and done.handover is not None and done.handover.decode_s == 0.06
    assert "0.42 s in the queue, read elsewhere in 1.90 s, 27.7 MB 4 ms later here, next token after 60 ms" in repr(
        done
    )
    assert "queue" not in replace(done, timings=replace(done.timings, queue_s=0.001)).figures


def test_no_delta_is_empty() -> None:
    """Case 17."""
    wire = Wire()
    wire.say("delta", 0, "a", (1,))
    wire.say("end", 1, "", (), finish_reason="stop")
    assert [d.text for d in wire.stream] == ["a"]


def test_an_error_at_the_end_is_raised_after_the_text_so_far() -> None:
    """Case 22."""
    wire = Wire()
    wire.say("delta", 0, "half", (1,))
    wire.say("end", 1, finish_reason="error", error=NodeFailed("ValueError: no", node="engine-1").to_dict())
    seen = []
    with pytest.raises(NodeFailed, match="engine-1: ValueError: no"):
        seen.extend(delta.text for delta in wire.stream)
    assert seen == ["half"] and wire.stream.text == "half"
    assert wire.stream.completion is not None and wire.stream.completion.finish_reason == "error"


def test_losing_the_leader_ends_the_stream_and_says_how_its_process_ended() -> None:
    """Case 29."""
    wire = Wire()
    wire.inbox.put("engine-0", {"type": "lost", "error": PeerLost("reset", node="engine-0").to_dict()})
    with pytest.raises(EngineLost, match="engine-0: ended by SIGKILL"):
        wire.stream.result()


def test_losing_another_node_is_left_to_the_leader_to_tell() -> None:
    wire = Wire()
    wire.inbox.put("engine-1", {"type": "lost", "error": PeerLost("reset", node="engine-1").to_dict()})
    assert wire.stream.next(0.01) is None and not wire.stream.done


def test_a_missing_frame_is_an_error_not_a_hole_in_the_text() -> None:
    wire = Wire()
    wire.say("delta", 0, "a", (1,))
    wire.say("delta", 2, "c", (3,))
    with pytest.raises(WireError, match="frame 1"):
        wire.stream.result()


def test_cancel_reaches_the_leader_only_while_the_request_runs() -> None:
    wire = Wire()
    wire.stream.cancel()
    wire.say("end", 0, finish_reason="cancelled")
    assert wire.stream.result().finish_reason == "cancelled"
    wire.stream.cancel()
    assert wire.cancelled == 1


def test_a_stream_can_be_awaited() -> None:
    wire = Wire()
    wire.say("delta", 0, "x", (1,))
    wire.say("end", 1, finish_reason="stop")

    async def read() -> list[str]:
        return [delta.text async for delta in wire.stream]

    assert asyncio.run(read()) == ["x"]


def test_any_number_of_streams_is_awaited_on_one_loop() -> None:
    """More than an executor has threads: what comes for the last is not held up by those that are silent."""
    wires = [Wire() for _ in range(100)]

    async def first_of(wire: Wire) -> str:
        async for delta in wire.stream:
            return delta.text
        raise AssertionError("it ended")

    async def read() -> str:
        silent = [asyncio.create_task(first_of(wire)) for wire in wires[:-1]]
        last = asyncio.create_task(first_of(wires[-1]))
        await asyncio.sleep(0.01)  # all of them wait by now; if not, the test is the easier one
        await asyncio.to_thread(wires[-1].say, "delta", 0, "x", (1,))
        text = await asyncio.wait_for(last, 4.0)  # under CHECK_S, which a thread would wait
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        return text

    assert asyncio.run(read()) == "x"


def test_news_of_the_prefill_is_no_part_of_the_answer_and_not_its_end() -> None:
    wire = Wire()
    seen = []
    for done in (256, 512):
        wire.inbox.put("engine-0", {"type": "prefill", "done": done, "total": 600})
        assert wire.stream.next(0.01) is None
        seen.append(wire.stream.prefill)
    assert seen == [(256, 600), (512, 600)] and wire.closed == 0
    wire.say("delta", 0, "a", (1,))
    wire.say("end", 1, finish_reason="stop")
    assert [d.text for d in wire.stream] == ["a"]
    assert wire.stream.prefill is None


GOOD_END = {"type": "end", "seq": 0, "text": "", "tokens": [], "finish_reason": "stop"}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": 7},
        {"type": "shout", "seq": 0, "text": "a", "tokens": []},
        {"type": "delta"},
        {"type": "delta", "seq": 0, "text": "a"},
        {"type": "delta", "seq": 0, "text": b"a", "tokens": []},
        {"type": "delta", "seq": "0", "text": "a", "tokens": []},
        {"type": "delta", "seq": None, "text": "a", "tokens": []},
        {"type": "delta", "seq": False, "text": "a", "tokens": []},
        {"type": "delta", "seq": 0, "text": "a", "tokens": "abc"},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1, "2"]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [-1]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1], "logprobs": 4},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1], "logprobs": [[-0.5]]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1], "logprobs": [[1, [], []]]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1], "logprobs": [[float("nan"), [], []]]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1], "logprobs": [[-0.5, [-1], [-0.5]]]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1, 2], "logprobs": [[-0.5, [], []]]},
        {"type": "delta", "seq": 0, "text": "a", "tokens": [1], "logprobs": [[-0.5, [1, 2], [-0.5]]]},
        {"type": "prefill"},
        {"type": "prefill", "done": 5, "total": 4},
        {"type": "prefill", "done": True, "total": 4},
        {"type": "error"},
        {"type": "lost", "error": "gone"},
        {k: v for k, v in GOOD_END.items() if k != "finish_reason"},
        {**GOOD_END, "finish_reason": "boredom"},
        {**GOOD_END, "finish_reason": "error"},
        {**GOOD_END, "error": "no"},
        {**GOOD_END, "usage": [1]},
        {**GOOD_END, "usage": {"prompt_tokens": "many"}},
        {**GOOD_END, "usage": {"generation_tokens": -1}},
        {**GOOD_END, "timings": 3},
        {**GOOD_END, "timings": {"ttft_s": "soon"}},
        {**GOOD_END, "timings": {"ttft_s": True}},
        {**GOOD_END, "layout": {}},
        {**GOOD_END, "stop_reason": 1},
    ],
    ids=str,
)
def test_a_frame_that_is_none_ends_the_stream_with_one_wire_error_and_the_request_too(message: dict[str, Any]) -> None:
    """Case 49: from an engine that proved the secret and is broken all the same."""
    wire = Wire()
    wire.inbox.put("engine-0", message)
    with pytest.raises(WireError, match="engine-0: "):
        wire.stream.result()
    assert wire.stream.completion is not None and wire.stream.completion.finish_reason == "error"
    assert (wire.cancelled, wire.closed) == (1, 1)


def test_timings_of_a_newer_leader_are_left_out() -> None:
    wire = Wire()
    wire.inbox.put("engine-0", {**GOOD_END, "timings": {"ttft_s": 0.5, "dreams_s": 9}})
    assert wire.stream.result().timings.ttft_s == 0.5


def test_the_inbox_lets_go_at_the_last_message_though_nobody_reads() -> None:
    wire = Wire()
    wire.say("delta", 0, "a", (1,))
    assert wire.closed == 0
    wire.say("end", 1, finish_reason="stop")
    assert wire.closed == 1
    assert wire.stream.result().text == "a"
    assert wire.closed == 1 and [done.text for done in wire.completions] == ["a"]


def test_a_stream_that_is_left_early_is_cancelled() -> None:
    wire = Wire()
    wire.say("delta", 0, "a", (1,))
    with wire.stream as stream:
        assert next(iter(stream)).text == "a"
    assert wire.cancelled == 1


def test_a_stream_nobody_holds_is_cancelled_and_an_ended_one_is_not() -> None:
    wire = Wire()
    counts = []
    for ended in (False, True):
        wire = Wire()
        cancelled: list[bool] = []
        line = Line(
            wire.inbox,
            cancel=lambda seen=cancelled: seen.append(True),  # type: ignore[misc]
            progress=lambda: 0,
            explain=lambda error: error,
            ended=lambda _: None,
        )
        stream = Stream(line, stall_s=1.0)
        if ended:
            wire.say("end", 0, finish_reason="stop")
        del stream
        gc.collect()
        counts.append(len(cancelled))
    assert counts == [1, 0]


class Relay:
    """A stream whose first leader is lost, and others that go on."""

    def __init__(self, others: int) -> None:
        self.first, self.others = Wire(), [Wire() for _ in range(others)]
        self.made: list[tuple[int, ...]] = []
        self.stream = Stream(self.first.line, stall_s=1.0, again=self._again)

    def _again(self, made: tuple[int, ...]) -> Line:
        self.made.append(made)
        if len(self.made) > len(self.others):
            raise EngineLost("nobody is left")
        return self.others[len(self.made) - 1].line


def lost(wire: Wire) -> None:
    wire.inbox.put("engine-0", {"type": "lost", "error": PeerLost("gone", node="engine-0").to_dict()})


def test_another_goes_on_where_a_lost_leader_was() -> None:
    relay = Relay(2)
    relay.first.say("delta", 0, "one", (1,))
    lost(relay.first)
    relay.others[0].say("delta", 0, " two", (2, 3))
    error = PeerLost("a rank is gone", node="engine-1").to_dict()
    relay.others[0].say("end", 1, "held", (4,), finish_reason="error", error=error)
    relay.others[1].say("end", 0, " three", (4,), finish_reason="length")
    assert [delta.text for delta in relay.stream] == ["one", " two", " three"], "what was held back comes from the next"
    assert relay.made == [(1,), (1, 2, 3)]
    done = relay.stream.completion
    assert done is not None and done.token_ids == (1, 2, 3, 4) and done.moves == 2
    assert relay.others[1].completions == [done] and not relay.first.completions
    assert [wire.closed for wire in (relay.first, *relay.others)] == [1, 1, 1]


def test_when_nobody_is_left_the_loss_is_the_error() -> None:
    relay = Relay(0)
    relay.first.say("delta", 0, "one", (1,))
    lost(relay.first)
    with pytest.raises(EngineLost, match="ended by SIGKILL"):
        list(relay.stream)
    assert relay.stream.text == "one" and relay.first.completions[0].finish_reason == "error"


def test_an_answer_that_was_cancelled_is_not_gone_on_with() -> None:
    relay = Relay(1)
    relay.stream.cancel()
    lost(relay.first)
    with pytest.raises(EngineLost):
        list(relay.stream)
    assert not relay.made


def test_errors_of_the_request_itself_are_not_tried_again() -> None:
    relay = Relay(1)
    relay.first.say("end", 0, finish_reason="error", error=NodeFailed("boom", node="engine-0").to_dict())
    with pytest.raises(NodeFailed):
        list(relay.stream)
    assert not relay.made


def test_whoever_reads_without_a_thread_is_woken_by_the_next_one_too() -> None:
    relay = Relay(1)

    async def read() -> list[str]:
        return [delta.text async for delta in relay.stream]

    async def both() -> list[str]:
        reading = asyncio.create_task(read())
        while relay.first.inbox._wake is None:
            await asyncio.sleep(0.001)
        lost(relay.first)
        while relay.others[0].inbox._wake is None:
            await asyncio.sleep(0.001)
        relay.others[0].say("end", 0, "two", (2,), finish_reason="length")
        return await asyncio.wait_for(reading, 4.0)  # under CHECK_S

    assert asyncio.run(asyncio.wait_for(both(), 10.0)) == ["two"]

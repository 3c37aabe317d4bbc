"""Prefill and decode groups of real engines: prompts are read in one and answered in another, and whatever becomes of
either, the text is that of one process or there is an error that says why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import Completion
from mlxcel_nb.client.verifying import verify
from mlxcel_nb.display.reports import load_view, status_view
from mlxcel_nb.errors import ClusterError, ConfigError, EngineLost, PeerLost
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import activity, nothing_left, on_engine, pid_of, this_node, wait_until
from tests.tiny import make_tiny

LENGTHS = (1, 255, 256, 257, 700)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = SamplingParams(max_tokens=600, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}.{length}")
    return [rng.randrange(1, 257) for _ in range(length)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny", max_position_embeddings=2048))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(6, threads=1)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(engines: Cluster, tiny: str) -> dict[int, Completion]:
    """What one process answers."""
    engines.load(tiny)
    answers = {length: engines.generate(prompt(length), PARAMS) for length in LENGTHS}
    engines.unload()
    return answers


@pytest.fixture(autouse=True)
def unloaded(engines: Cluster) -> Iterator[None]:
    """A test that fails leaves no model behind."""
    yield
    with contextlib.suppress(ClusterError):  # none is loaded
        engines.unload()


def idle(cluster: Cluster) -> None:
    nodes = [node.node_id for node in cluster.nodes]
    wait_until(lambda: {activity(cluster, node) for node in nodes} == {"idle"}, deadline_s=20, what="idle engines")


@pytest.mark.parametrize("readers", ["tp1", "tp2", "tp3"])
@pytest.mark.parametrize("answerers", ["tp1", "tp2", "tp3"])
def test_tensor_ranks_of_any_number_hand_over_to_any_number(
    engines: Cluster, tiny: str, alone: dict[int, Completion], readers: str, answerers: str
) -> None:
    """Case 38."""
    engines.load(tiny, prefill=1, decode=1, prefill_layout=readers, decode_layout=answerers, prefill_from=0)
    for length, expected in alone.items():
        answer = engines.generate(prompt(length), PARAMS)
        assert answer.token_ids == expected.token_ids
        assert answer.handover is not None
    engines.unload()


def test_an_answer_says_what_became_of_its_prompt(engines: Cluster, tiny: str) -> None:
    """Of a short one not all may be there: what the readers have to say comes after what they send."""
    engines.load(tiny, prefill=1, decode=1, prefill_layout="tp2", prefill_from=0)
    told = engines.generate(prompt(700), LONG).handover
    assert told is not None and told.transfer_bytes == 700 * 2 * 4 * 8 * 5 * 4, "keys and values of 4 heads, 5 layers"
    assert told.transfer_sent_bytes and told.transfer_bytes < told.transfer_sent_bytes < 1.1 * told.transfer_bytes
    assert told.transfer_hidden is not None and 0 < told.transfer_hidden <= 1 and told.transfer_encoding == "plain"
    assert min(told.prefill_s or 0, told.decode_s or 0) > 0 and (told.transfer_s or 0) >= 0
    engines.unload()


@pytest.mark.parametrize("answerers", ["tp1", "pp2", "0-0,1-4"])
def test_stages_hand_over_to_stages_with_other_cuts(
    engines: Cluster, tiny: str, alone: dict[int, Completion], answerers: str
) -> None:
    engines.load(tiny, prefill=1, decode=1, prefill_layout="0-2,3-4", decode_layout=answerers, prefill_from=0)
    for length, expected in alone.items():
        assert engines.generate(prompt(length), PARAMS).token_ids == expected.token_ids
    engines.unload()


@pytest.mark.parametrize("readers", ["tp1", "tp2xpp2"])
def test_many_at_once_decode_in_one_batch_and_each_is_what_it_is_alone(
    engines: Cluster, tiny: str, readers: str
) -> None:
    prompts = [prompt(20 + 37 * number % 400, number) for number in range(24)]
    params = [
        SamplingParams(max_tokens=4 + number % 30, temperature=0.8 * (number % 2), seed=number, ignore_eos=True)
        for number in range(24)
    ]
    engines.load(tiny)
    expected = [engines.generate(each, how).token_ids for each, how in zip(prompts, params, strict=True)]
    engines.unload()
    engines.load(tiny, prefill=1, decode=1, prefill_layout=readers, prefill_from=0)
    answers = engines.generate_all(prompts, params)
    assert [each.token_ids for each in answers] == expected
    assert all(each.handover is not None for each in answers)
    idle(engines)
    engines.unload()


def test_what_is_said_of_groups(engines: Cluster, tiny: str) -> None:
    report = engines.load(tiny, prefill=1, decode=2, prefill_layout="tp2", kv_transfer="int8")
    assert report.layout == "prefill tp2 + 2 decode" and (report.readers, report.replicas) == (1, 2)
    text = load_view(report).text
    assert "1 prefill group reads prompts for 2 decode groups; keys and values travel int8: as asked" in text
    assert "decode 1" in text and "prefill 0" in text
    answer = engines.generate(prompt(300), PARAMS)
    assert answer.handover is not None and "read elsewhere in" in answer.figures
    assert "prefill 0, stage 0, rank 1" in status_view(engines.status()).text
    short = engines.generate(prompt(8), PARAMS)
    assert short.handover is None, "a short prompt is read where it is answered"
    engines.unload()


def test_what_is_kept_where_it_is_answered_is_not_read_elsewhere(engines: Cluster, tiny: str) -> None:
    engines.load(tiny, prefill=1, decode=1, prefill_from=64)
    first = engines.generate(prompt(300), PARAMS)
    again = engines.generate([*prompt(300), *first.token_ids, 5, 6], PARAMS)
    assert first.handover is not None and again.handover is None
    assert again.cached_tokens >= 288
    other = engines.generate([*prompt(300)[:280], *prompt(90, 1)], PARAMS)
    assert other.handover is not None and other.cached_tokens == 256, "its reader has the beginning too"
    engines.unload()


def cut_links_for_caches() -> int:
    """On an engine: its links for caches break off."""
    links = list(this_node()._worker.instance.handoff._links.values())
    for link in links:
        link.link.hang_up()
    return len(links)


def test_a_link_for_caches_that_breaks_off_is_made_again(engines: Cluster, tiny: str) -> None:
    engines.load(tiny, prefill=1, decode=1, prefill_from=0)
    expected = engines.generate(prompt(300), PARAMS).token_ids
    assert on_engine(engines, "engine-0", cut_links_for_caches) == 1
    assert engines.generate(prompt(300), PARAMS).token_ids == expected, "whoever reads it meanwhile"
    wait_until(
        lambda: engines.generate(prompt(300), PARAMS).handover is not None
        and engines.generate([*prompt(40, 9), *prompt(300)], PARAMS).handover is not None,
        deadline_s=20, what="prompts to be read elsewhere again",
    )  # fmt: skip
    engines.unload()


def test_verify_compares_both_groups_with_the_whole(engines: Cluster, tiny: str) -> None:
    """The first token's logits are of those who read, the others' of those who went on with what they were sent."""
    names = ("di", "di:tp2", "di:pp2+tp2")
    found = [verdict for verdict, _ in verify(engines, tiny, names, prompt(300), 12)]
    assert [(each.layout, each.equal, each.refused, each.failed) for each in found] == [
        (n, True, "", "") for n in names
    ]
    assert all(0 < each.delta < 1e-4 or each.layout == "di" for each in found)
    assert engines.model is None


def test_groups_that_cannot_work_together_are_refused_with_what_to_do(engines: Cluster, tiny: str) -> None:
    with pytest.raises(ConfigError, match="there are prefill groups, but no decode group"):
        engines.load(tiny, prefill=1)
    with pytest.raises(ConfigError, match="2 replicas beside prefill and decode groups"):
        engines.load(tiny, prefill=1, decode=1, dp=2)
    with pytest.raises(ConfigError, match=r"prefill tp3 \+ 2 decode tp2 needs 7 engines, this cluster has 6"):
        engines.load(tiny, prefill=1, decode=2, prefill_layout="tp3", decode_layout="tp2")
    with pytest.raises(ConfigError, match="kv_transfer 'int2'"):
        engines.load(tiny, prefill=1, decode=1, kv_transfer="int2")
    with pytest.raises(ConfigError, match="a layout of prefill or decode groups, and there are none"):
        engines.load(tiny, decode_layout="tp2")
    assert engines.model is None


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled"])
def test_every_end_is_told_once(engines: Cluster, tiny: str, reason: str) -> None:
    """Case 22, disaggregated."""
    engines.load(tiny, prefill=1, decode=1, prefill_from=0)
    stream = engines.stream(prompt(300), LONG if reason != "stop" else SamplingParams(max_tokens=400, stop=(" ",)))
    if reason == "cancelled":
        next(iter(stream))
        stream.cancel()
    completion = stream.result()
    assert completion.finish_reason in ({reason} if reason != "stop" else {"stop", "length"})
    idle(engines)
    engines.unload()


def test_a_request_that_is_cancelled_while_it_is_read_is_read_no_more(engines: Cluster, tiny: str) -> None:
    engines.load(tiny, prefill=1, decode=1, prefill_from=0)
    streams = [engines.stream(prompt(1900, number), PARAMS) for number in range(6)]
    for stream in streams:
        stream.cancel()
    assert {stream.result().finish_reason for stream in streams} == {"cancelled"}
    idle(engines)
    work = {node.node_id: node.work["engine"] for node in engines.status().nodes if node.work.get("engine")}
    assert all(each["running"] == each["waiting"] == 0 for each in work.values())
    assert engines.generate(prompt(40), PARAMS).finish_reason == "length"
    engines.unload()


# -- losses -------------------------------------------------------------------------------------------


def kill(cluster: Cluster, node_id: str) -> None:
    os.kill(pid_of(cluster, node_id), signal.SIGKILL)


def test_when_whoever_reads_dies_another_reads(tiny: str) -> None:
    with nothing_left(Cluster(3, threads=1)) as cluster:
        cluster.load(tiny)
        expected = [cluster.generate(prompt(900, number), PARAMS).token_ids for number in range(8)]
        cluster.unload()
        cluster.load(tiny, prefill=2, decode=1, prefill_from=0)
        streams = [cluster.stream(prompt(900, number), PARAMS) for number in range(8)]
        wait_until(lambda: activity(cluster, "engine-0") == "prefill", deadline_s=20, what="a prompt to be read")
        kill(cluster, "engine-0")
        answers = [stream.result() for stream in streams]
        assert [each.token_ids for each in answers] == expected
        assert cluster.generate(prompt(300), PARAMS).handover is not None
        kill(cluster, "engine-1")
        assert cluster.generate(prompt(900, 3), PARAMS).token_ids == expected[3], "when none is left it is read here"


def test_when_whoever_answers_dies_another_goes_on_with_the_same_text(tiny: str) -> None:
    with nothing_left(Cluster(3, threads=1)) as cluster:
        cluster.load(tiny)
        expected = cluster.generate(prompt(700), LONG).token_ids
        cluster.unload()
        cluster.load(tiny, prefill=1, decode=2, prefill_from=0)
        stream = cluster.stream(prompt(700), LONG)
        for _ in zip(range(40), stream, strict=False):
            pass
        answering = {0: "engine-1", 1: "engine-2"}[stream.replica or 0]
        kill(cluster, answering)
        completion = stream.result()
        assert completion.token_ids == expected and completion.moves == 1
        kill(cluster, ({"engine-1", "engine-2"} - {answering}).pop())
        with pytest.raises((EngineLost, PeerLost)):
            cluster.generate(prompt(30), PARAMS)


def test_a_member_of_the_readers_that_dies_ends_no_request(tiny: str) -> None:
    """One of two ranks: the group is lost, and those who answer read themselves."""
    with nothing_left(Cluster(3, threads=1)) as cluster:
        cluster.load(tiny)
        expected = [cluster.generate(prompt(900, number), PARAMS).token_ids for number in range(4)]
        cluster.unload()
        cluster.load(tiny, prefill=1, decode=1, prefill_layout="tp2", prefill_from=0)
        streams = [cluster.stream(prompt(900, number), PARAMS) for number in range(4)]
        wait_until(lambda: activity(cluster, "engine-1") == "prefill", deadline_s=20, what="a prompt to be read")
        kill(cluster, "engine-1")
        assert [stream.result().token_ids for stream in streams] == expected


def test_a_reader_that_stops_is_waited_for_and_not_for_ever(tiny: str) -> None:
    """SIGSTOP for longer than a step may take: its prompts are read where they are answered."""
    with nothing_left(Cluster(2, threads=1, step_s=3.0)) as cluster:
        cluster.load(tiny)
        expected = cluster.generate(prompt(900), PARAMS).token_ids
        cluster.unload()
        cluster.load(tiny, prefill=1, decode=1, prefill_from=0)
        os.kill(pid_of(cluster, "engine-0"), signal.SIGSTOP)
        try:
            stream = cluster.stream(prompt(900), PARAMS)
            ended = threading.Timer(20.0, stream.cancel)
            ended.start()
            assert stream.result().token_ids == expected
            ended.cancel()
        finally:
            os.kill(pid_of(cluster, "engine-0"), signal.SIGCONT)


def test_what_is_rounded_on_the_way_says_what_that_cost(engines: Cluster, smollm2: Path) -> None:
    report = engines.load(str(smollm2), prefill=1, decode=1, kv_transfer="int8")
    assert report.transfer.startswith("int8: as asked")
    answer = engines.generate("The history of the world is long. " * 20, PARAMS)
    told = answer.handover
    assert told is not None and told.transfer_encoding == "int8" and 0 < (told.transfer_error or 0) < 0.02
    assert told.transfer_bytes and told.transfer_sent_bytes
    assert told.transfer_sent_bytes < 0.3 * told.transfer_bytes, "of float32"
    engines.unload()


def test_the_same_in_http(engines: Cluster, tmp_path: Path, smollm2: Path) -> None:
    """The router holds no model and serves the same API."""
    import httpx

    from mlxcel_nb.serve.served import Served
    from mlxcel_nb.serve.server import ApiServer

    engines.load(str(smollm2), prefill=1, decode=1, prefill_from=16)
    with ApiServer(Served(engines, names=["m"]), port=0) as server:
        body = {"model": "m", "prompt": "The capital of France is " * 8, "max_tokens": 8, "temperature": 0}
        one = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        assert one["choices"][0]["finish_reason"] == "length" and one["usage"]["completion_tokens"] == 8
    engines.unload()

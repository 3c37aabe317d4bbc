"""Links on a loop: messages, streams, pings, and how a peer's end or silence is told."""

from __future__ import annotations

import asyncio
import socket

import psutil
import pytest

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.control import control_link as aio
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.util import times
from mlxcel_nb.wire.frames import MAX_FILLER, Kind, close_reason
from tests.net.helpers import Heard, control_pair, link_pair, run


def test_messages_and_streams_arrive_in_order():
    async def case():
        async with control_pair() as (ours, theirs):
            for n in range(300):
                ours.link.send({"n": n})
                theirs.link.send_stream({"n": n})
            assert [(await theirs.messages.get())["n"] for _ in range(300)] == list(range(300))
            assert [(await ours.streamed.get())["n"] for _ in range(300)] == list(range(300))

    run(case())


@pytest.mark.parametrize("rekey_every", [1, 2, 7])
def test_keys_are_replaced_on_the_way(rekey_every):
    async def case():
        async with control_pair(rekey_every=rekey_every) as (ours, theirs):
            for n in range(100):
                ours.link.send_stream({"n": n})
            assert [(await theirs.streamed.get())["n"] for _ in range(100)] == list(range(100))
            assert ours.link.link.sealer.rekeys >= 100 // rekey_every
            assert await theirs.link.ping(b"x" * 1000) > 0

    run(case())


def test_a_large_message_goes_whole():
    async def case():
        async with control_pair() as (ours, theirs):
            ours.link.send({"text": "x" * 3_000_000})
            await ours.link.drain()
            assert len((await theirs.messages.get())["text"]) == 3_000_000

    run(case())


def test_pings_are_echoed_with_their_filler():
    async def case():
        async with control_pair() as (ours, theirs):
            trips = await asyncio.gather(*(ours.link.ping(b"z" * MAX_FILLER) for _ in range(6)))
            assert min(trips) > 0
            await theirs.link.ping()

    run(case())


def test_a_ping_is_cancelled_even_at_the_moment_its_pong_comes():
    async def case():
        async with control_pair() as (ours, _theirs):
            ping = asyncio.ensure_future(ours.link.ping())
            pong = ours.link._pings.pong

            def pong_and_cancel(*heard):
                pong(*heard)
                ping.cancel()

            ours.link._pings.pong = pong_and_cancel
            with pytest.raises(asyncio.CancelledError):
                await ping

    run(case())


def test_status_tells_cipher_and_round_trip():
    async def case():
        async with control_pair() as (ours, _):
            await ours.link.ping()
            info = ours.link.info()
            assert info["cipher"] == "aes-256-gcm"
            assert info["transport"] == "tcp"
            assert info["state"] == "alive"
            assert 0 < info["rtt_s"] < 10
            assert info["sent_bytes"] > 0
            assert info["received_bytes"] > 0
            assert info["age_s"] > 0
            assert info["address"].startswith("127.0.0.1:")

    run(case())


def test_a_round_trip_is_known_at_once_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 60.0)

    async def case():
        async with link_pair() as (ours, theirs):
            end, other = Heard(theirs, measure=True), Heard(ours)
            async with asyncio.timeout(10):
                while end.link.rtt_s is None:
                    await asyncio.sleep(0.01)
            assert other.link.rtt_s is None
            end.link.close()
            other.link.close()

    run(case())


def test_a_credit_of_nothing_is_no_error():
    async def case():
        async with control_pair() as (ours, theirs):
            ours.link._write(Kind.CREDIT, 1, bytes(4))
            assert await ours.link.ping() > 0
            theirs.link.send_stream({"still": "open"})
            assert await ours.streamed.get() == {"still": "open"}

    run(case())


async def frames_until_the_end(link: Link) -> list[tuple[Kind, bytes]]:
    """What comes over a link that nobody drives; its end must be a clean one."""
    heard = []
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(link.sock, 65536):
        link.reader.feed(data)
        heard += [(frame.kind, bytes(frame.payload)) for frame in link.reader.frames()]
    link.reader.receive_eof()
    return heard


def test_a_goodbye_is_returned():
    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            ours.sock.send(ours.sealer.seal_close("bye"))
            assert await end.states.get() == ("closed", "bye")
            assert [kind for kind, _ in await frames_until_the_end(ours)] == [Kind.CLOSE]

    run(case())


def test_a_silent_peer_is_told_why_it_is_given_up(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 0.05)
    monkeypatch.setattr(times, "SUSPECT_S", 0.1)
    monkeypatch.setattr(times, "DEAD_S", 0.2)

    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            heard = await frames_until_the_end(ours)
            assert {kind for kind, _ in heard[:-1]} <= {Kind.PING} and len(heard) <= 4  # a busy machine pings later
            assert heard[-1][0] is Kind.CLOSE
            assert "silent" in close_reason(heard[-1][1])
            assert (await end.states.get())[0] == "suspect"
            assert (await end.states.get())[0] == "dead"

    run(case())


def test_silence_within_a_frame_is_judged_by_the_frame_s_time(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 0.05)
    monkeypatch.setattr(times, "SUSPECT_S", 0.1)
    monkeypatch.setattr(times, "DEAD_S", 0.2)
    monkeypatch.setattr(times, "FRAME_REST_S", 0.6)

    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            began = asyncio.get_running_loop().time()
            ours.sock.send(bytes(ours.sealer.seal(Kind.PING, 0, b"12345678"))[:-1])
            heard = await frames_until_the_end(ours)
            assert 0.5 < asyncio.get_running_loop().time() - began < 10
            assert heard[-1][0] is Kind.CLOSE
            assert "rest of a frame" in close_reason(heard[-1][1])
            assert not end.link.open

    run(case())


def test_half_a_frame_that_came_before_the_driver_has_its_time_too(monkeypatch):
    monkeypatch.setattr(times, "FRAME_REST_S", 0.3)

    async def case():
        async with link_pair() as (ours, theirs):
            theirs.reader.feed(bytes(ours.sealer.seal(Kind.PING, 0, b"12345678"))[:-1])
            end = Heard(theirs)
            async with asyncio.timeout(10):
                assert "rest of a frame" in (await end.states.get())[1]

    run(case())


def test_a_goodbye_is_told_with_its_reason():
    async def case():
        async with control_pair() as (ours, theirs):
            ours.link.send({"last": True})
            ours.link.close("going home")
            assert await theirs.states.get() == ("closed", "going home")
            assert await theirs.messages.get() == {"last": True}
            ours.link.send({"nobody": "hears"})
            with pytest.raises(PeerLost, match="going home"):
                await theirs.link.ping()
            assert ours.states.empty()

    run(case())


def test_an_end_without_goodbye_is_a_death():
    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            ours.sock.shutdown(socket.SHUT_WR)
            state, reason = await end.states.get()
            assert state == "dead"
            assert "without a goodbye" in reason

    run(case())


def test_a_reset_is_a_death_at_once():
    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            ours.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            began = asyncio.get_running_loop().time()
            ours.close()
            assert (await end.states.get())[0] == "dead"
            assert asyncio.get_running_loop().time() - began < times.SUSPECT_S

    run(case())


def test_silence_is_suspect_then_dead_and_a_sign_of_life_mends_it(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 0.05)
    monkeypatch.setattr(times, "SUSPECT_S", 0.2)
    monkeypatch.setattr(times, "DEAD_S", 0.8)

    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            assert (await end.states.get())[0] == "suspect"
            ours.sock.send(ours.sealer.seal(Kind.PING, 0, b"iamalive"))
            assert (await end.states.get())[0] == "alive"
            assert (await end.states.get())[0] == "suspect"
            state, reason = await end.states.get()
            assert state == "dead"
            assert "silent for" in reason

    run(case())


def test_half_a_frame_ends_the_link_after_its_time(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 0.05)
    monkeypatch.setattr(times, "FRAME_REST_S", 0.3)

    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            frame = bytes(ours.sealer.seal(Kind.PING, 0, b"12345678"))
            for byte in frame[:-1]:
                ours.sock.send(bytes([byte]))
                if (await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0.02))]))[0] and not end.link.open:
                    break
            state, reason = await end.states.get()
            assert state == "dead"
            assert "rest of a frame" in reason

    run(case())


@pytest.mark.parametrize("kind", [Kind.TENSOR, Kind.KV])
def test_bulk_has_no_business_on_a_control_link(kind):
    async def case():
        async with link_pair() as (ours, theirs):
            end, other = Heard(theirs), Heard(ours)
            other.link._write(kind, 1, b"weights")
            assert (await end.states.get())[0] == "dead"
            state, reason = await other.states.get()
            assert state == "closed"
            assert kind.name.lower() in reason

    run(case())


def test_a_frame_that_does_not_authenticate_ends_the_link():
    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            frame = bytearray(ours.sealer.seal(Kind.CONTROL, 0, b"\x80"))
            frame[-1] ^= 1
            ours.sock.send(frame)
            state, reason = await end.states.get()
            assert state == "dead"
            assert "authenticate" in reason
            assert end.messages.empty()

    run(case())


def test_a_handler_that_fails_does_not_end_the_link(caplog):
    async def case():
        def bad(link, message):
            raise KeyError(message["n"])

        async with link_pair() as (ours, theirs):
            Heard(theirs, on_message=bad)
            other = Heard(ours)
            other.link.send({"n": 1})
            assert await other.link.ping() > 0

    run(case())
    assert "handler failed" in caplog.text


def test_a_peer_that_never_reads_costs_a_bounded_amount_of_memory():
    """Case 31."""

    async def case():
        async with link_pair() as (ours, theirs):
            del theirs  # never read from
            end = Heard(ours)
            before = psutil.Process().memory_info().rss
            text = "x" * 10_000
            for _ in range(4000):
                end.link.send_stream({"text": text})
                if not end.link.open:
                    break
            assert (await end.states.get()) == ("dead", "does not keep up with its stream")
            assert psutil.Process().memory_info().rss - before < 20 << 20

    run(case())


def test_control_messages_to_a_peer_that_never_reads_are_bounded_too():
    async def case():
        async with link_pair() as (ours, theirs):
            del theirs
            end = Heard(ours)
            for _ in range(4000):
                end.link.send({"text": "x" * 100_000})
                if not end.link.open:
                    break
            assert (await end.states.get()) == ("dead", "does not read what it is sent")

    run(case())


def test_a_slow_reader_gets_everything_by_and_by():
    """Case 31."""

    async def case():
        async with link_pair() as (ours, theirs):
            sender = Heard(ours)
            for n in range(500):
                sender.link.send_stream({"n": n})
            assert sender.link._backlog  # credits stop it long before the socket is full
            reader = Heard(theirs)
            assert [(await reader.streamed.get())["n"] for _ in range(500)] == list(range(500))
            await sender.link.drain()
            assert not sender.link._backlog
            sender.link.close()
            reader.link.close()

    run(case())


def test_pings_without_reading_the_pongs_are_cut_off(monkeypatch):
    monkeypatch.setattr(aio, "QUEUE_BYTES", 64 << 20)

    async def case():
        async with link_pair() as (ours, theirs):
            end = Heard(theirs)
            loop = asyncio.get_running_loop()

            async def flood():
                for n in range(100):
                    frame = bytes(ours.sealer.seal(Kind.PING, 0, n.to_bytes(8, "big"), bytes(MAX_FILLER)))
                    await loop.sock_sendall(ours.sock, frame)

            task = asyncio.ensure_future(flood())
            state, reason = await end.states.get()
            task.cancel()
            assert state == "dead"
            assert "8 pings" in reason

    run(case())


def test_the_last_words_are_read_though_writing_failed():
    async def case():
        async with link_pair() as (ours, theirs):
            speaker = Heard(ours)
            speaker.link.send({"word": "last"})
            speaker.link.close("over")
            end = Heard(theirs)
            assert await end.states.get() == ("closed", "over")
            assert await end.messages.get() == {"word": "last"}

    run(case())

"""Bent tensors and caches against receivers that look into them: no part of one is used, and none takes our memory."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from tests.peer import codec, ends
from tests.peer.bends import Bend, check, end_of_frames
from tests.peer.bends_tensors import CACHE, DATA, KV_ROWS, RAW, TENSOR_ROWS, ZEROS, honest
from tests.peer.codec import Broken
from tests.peer.ends import SECRET, Base, Command
from tests.peer.peer import Peer
from tests.waiting import until

PEAK_BYTES = 50 << 20
"""What all the bent messages together may add to the process's peak (case 42)."""

HOT = {"schema": 1, "features": [], "versions": {}, "link": "hot"}


class Receiver:
    """A running receiver.py, and what it told of each link."""

    def __init__(self, running: Command, address: tuple[str, int]) -> None:
        self._command, self._address = running, address

    def dial(self, first: dict[str, object] | None = None) -> Peer:
        return Peer.dial(self._address, SECRET).be_client(greet=False).greet(first)

    def told(self, peer: Peer, what: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self._command.lines if line.startswith("{")]
        return [line for line in lines if line["node"] == peer.hello.node_id and line["what"] == what]

    def ended(self, peer: Peer) -> str:
        assert until(lambda: self.told(peer, "end"), 20), self._command.text
        return str(self.told(peer, "end")[0]["cause"])

    def retry_tensor(self) -> None:
        """The one retry of case 42: the same tensor, on a fresh connection."""
        with self.dial(HOT) as peer:
            peer.send(codec.TENSOR, 1, codec.tensor(6, (len(RAW),), RAW, flags=codec.LZ4, name="1.0.0"))
            assert msgpack.unpackb(next(peer.frames()).payload)["type"] == "taken"
            peer.close("done")
            assert until(lambda: self.told(peer, "tensor"), 20)
            assert self.told(peer, "tensor")[0]["sha256"] == hashlib.sha256(RAW).hexdigest()

    def retry_cache(self) -> None:
        with self.dial() as peer:
            honest(peer)
            answer = msgpack.unpackb(next(peer.frames()).payload)
            assert answer["type"] == "ack" and answer["message"][1] == codec.KV_ACK
            peer.close("done")
            assert until(lambda: self.told(peer, "cache"), 20)
            assert self.told(peer, "cache")[0]["sha256"] == hashlib.sha256(b"".join(DATA)).hexdigest()


def peak(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


@pytest.fixture(scope="module")
def receiver(files: dict[str, str]) -> Iterator[Receiver]:
    """When its tests are over its descriptors and its peak of memory must not have moved far."""
    program = (str(Path(__file__).with_name("receiver.py")),)
    with ends.command(files["secret"], program=program) as running:
        found = running.wait_for(r"listening on ([\d.]+):(\d+)")
        receiver = Receiver(running, (found[1], int(found[2])))
        receiver.retry_tensor()
        receiver.retry_cache()
        base, before = Base(running.process.pid), peak(running.process.pid)
        yield receiver
        receiver.retry_tensor()
        receiver.retry_cache()
        base.check()
        assert peak(running.process.pid) < before + PEAK_BYTES
        assert "Traceback" not in running.text


@pytest.mark.parametrize("row", TENSOR_ROWS, ids=str)
def test_a_bent_tensor(row: Bend, receiver: Receiver) -> None:
    """Case 42, case 49: an error before allocation, the connection closed, one retry, no partial tensor used."""
    for act in row.acts:
        with receiver.dial(HOT) as peer:
            act(peer)
            end = end_of_frames(peer)
            check(row, end)
            if end[0] == "told":
                assert receiver.ended(peer)
                assert not receiver.told(peer, "tensor"), "a part of a bent tensor was used"
    receiver.retry_tensor()


@pytest.mark.parametrize("row", KV_ROWS, ids=str)
def test_a_bent_cache(row: Bend, receiver: Receiver) -> None:
    """Case 42, case 49: the same for caches on their way."""
    for act in row.acts:
        with receiver.dial() as peer:
            act(peer)
            check(row, end_of_frames(peer))
            assert not receiver.told(peer, "cache"), "a part of a bent cache was used"
    receiver.retry_cache()


def test_ten_megabytes_of_zeros_are_a_tensor_like_any_other(receiver: Receiver) -> None:
    """Case 42: ten megabytes of zeros."""
    with receiver.dial(HOT) as peer:
        for step, flags in enumerate((codec.LZ4, codec.LZ4 | codec.SHUFFLED, 0)):
            whole = codec.tensor(0, (len(ZEROS) // 4,), ZEROS, flags=flags, name=f"1.{step}.0")
            for payload in [whole] if flags else codec.pieces(whole, 512 << 10):
                peer.send(codec.TENSOR, 1, payload)
            assert msgpack.unpackb(next(peer.frames()).payload) == {"type": "taken", "step": step}
        peer.close("done")
    assert until(lambda: receiver.told(peer, "end"), 20)
    assert {str(told["sha256"]) for told in receiver.told(peer, "tensor")} == {hashlib.sha256(ZEROS).hexdigest()}


@pytest.mark.parametrize("dtype", codec.ELEMENT_BYTES)
def test_every_dtype_arrives_whole_and_in_pieces(dtype: int, receiver: Receiver) -> None:
    data = RAW[: 64 * codec.ELEMENT_BYTES[dtype]] if dtype != 8 else b"\0\1" * 32
    ways = [
        [codec.tensor(dtype, (4, 16), data, name="1.0.0")],
        codec.pieces(codec.tensor(dtype, (4, 16), data, name="1.1.0"), 50),
        [codec.tensor(dtype, (64,), data, flags=codec.LZ4 | codec.SHUFFLED, name="1.2.0", bend=bytes)],
    ]
    smaller = len(ways[2][0]) < len(codec.tensor(dtype, (64,), data, name="1.2.0"))
    with receiver.dial(HOT) as peer:
        for payloads in ways if smaller else ways[:2]:
            for payload in payloads:
                peer.send(codec.TENSOR, 1, payload)
            assert msgpack.unpackb(next(peer.frames()).payload)["type"] == "taken"
        peer.close("done")
    assert until(lambda: receiver.told(peer, "end"), 20)
    assert {str(told["sha256"]) for told in receiver.told(peer, "tensor")} == {hashlib.sha256(data).hexdigest()}


def test_whoever_sends_without_credit_is_told_so(files: dict[str, str]) -> None:
    """Case 49: the 65th frame, where the receiver keeps what it has not been asked for and grants no more."""
    program = (str(Path(__file__).with_name("receiver.py")),)
    with ends.command(files["secret"], program=program) as running:
        found = running.wait_for(r"listening on ([\d.]+):(\d+)")
        with Peer.dial((found[1], int(found[2])), SECRET) as peer:
            peer.be_client(greet=False).greet(HOT | {"wait": 20})
            kept = codec.tensor(6, (9 << 20,), bytes(9 << 20), name="2.0.0")
            small = codec.tensor(6, (1,), b"x", name="2.0.0")
            try:
                for number in range(200):
                    peer.write(peer.out.seal(codec.TENSOR, 1, small if number > 8 else kept))
            except ConnectionError:
                pass
            end = end_of_frames(peer)
            assert end[0] in {"told", "cut"} and (end[0] == "cut" or "credit" in end[1]), end
        running.wait_for("beyond the credit")


def test_a_goodbye_that_is_shorter_than_the_tensor_waited_for_is_heard(receiver: Receiver) -> None:
    """Close frame and end of stream come at once, to a receiver that knows the size of what is due."""
    for _ in range(3):
        with receiver.dial(HOT) as peer:
            peer.send(codec.TENSOR, 1, codec.tensor(6, (len(RAW),), RAW, name="1.0.0"))
            assert msgpack.unpackb(next(peer.frames()).payload)["type"] == "taken"
            peer.close("it is late")
            assert "it is late" in receiver.ended(peer)


def test_an_honest_sender_stops_where_its_credit_ends(receiver: Receiver) -> None:
    with receiver.dial(HOT) as peer:
        for number in range(64):
            peer.send(codec.TENSOR, 1, codec.tensor(6, (1,), b"x", name=f"0.0.{number}"))
        with pytest.raises(Broken, match="no credit"):
            peer.send(codec.TENSOR, 1, codec.tensor(6, (1,), b"x", name="0.0.64"))
        peer.ping()
        peer.pong()
        assert peer.credit[1] == 64
        peer.close("done")


def test_a_cache_in_any_order_is_the_cache(receiver: Receiver) -> None:
    with receiver.dial() as peer:
        for at in (0, 4, 1, 3, 2):  # nothing is paired by order of arrival, but a layer is described before its pieces
            peer.send(codec.KV, 1, CACHE[at])
        assert msgpack.unpackb(next(peer.frames()).payload)["type"] == "ack"
        peer.close("done")

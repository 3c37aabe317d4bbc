"""What surrounds a group of MLX's own: the port kept for it, the environment it is formed from, who is stuck in it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_nb.errors import (
    Cancelled,
    ClusterError,
    MlxcelError,
    NodeFailed,
    PeerAborted,
    PeerLost,
    StepTimeout,
    WireError,
)
from mlxcel_nb.runtime import mlx_groups, stuck
from mlxcel_nb.runtime.commands import Outbox
from mlxcel_nb.runtime.mlx_groups import GO, Formed, MlxCollectives
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.runtime.stuck import StuckWatch
from mlxcel_nb.runtime.worker import Worker
from tests.runtime.test_protocol import load_order


def test_an_order_tells_the_choice_and_an_unknown_one_is_refused() -> None:
    told = load_order(collectives="mlx-ring").to_dict()
    assert LoadOrder.from_dict(told).collectives == "mlx-ring"
    with pytest.raises(WireError, match="collectives 'gloo' are unknown here"):
        LoadOrder.from_dict({**told, "collectives": "gloo"})
    del told["collectives"]
    assert LoadOrder.from_dict(told).collectives == "own"


def test_a_reserved_port_can_be_reached_until_mlx_takes_it() -> None:
    reserved, trouble = mlx_groups._reserve("127.0.0.1")
    assert reserved is not None and not trouble
    with reserved:
        host, _, port = reserved.address.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        reserved.stop_listening()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=5)
        with pytest.raises(OSError, match="in use"), socket.socket() as stranger:  # one that does not say it shares
            stranger.bind((host, int(port)))
        with mlx_groups._bound(host, int(port)) as mlx:
            mlx.listen()
            socket.create_connection((host, int(port)), timeout=5).close()


def test_where_there_can_be_no_port_the_reason_is_told() -> None:
    assert "IPv4 alone" in mlx_groups._reserve("::1")[1]
    assert "no port for MLX's group on 192.0.2.1" in mlx_groups._reserve("192.0.2.1")[1]


def test_the_environment_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", "7")
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(ZeroDivisionError), mlx_groups._environment({"MLX_RANK": "1", "MLX_HOSTFILE": "x"}):
        assert (os.environ["MLX_RANK"], os.environ["MLX_HOSTFILE"]) == ("1", "x")
        raise ZeroDivisionError
    assert os.environ["MLX_RANK"] == "7" and "MLX_HOSTFILE" not in os.environ


def test_the_host_file_is_gone_when_mlx_forms_no_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLX itself refuses the rank: two in a group of one."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ClusterError, match=r"^n0: MLX could not form its ring: .*Restart the cluster"):
        mlx_groups._form("ring", 2, ["127.0.0.1:1"], "n0")
    assert not list(tmp_path.iterdir())


class Links:
    """A fabric of two ranks of which the votes are used alone, and what is found out afterwards."""

    def __init__(self, *heard: bytes | MlxcelError, afterwards: MlxcelError | None = None) -> None:
        self.ranks = {1: None}
        self.leader = "another"
        self.told: list[bytes] = []
        self._heard = list(heard)
        self._afterwards = afterwards

    def tell_ranks(self, words: Mapping[int, bytes], _interrupt: Any) -> None:
        self.told.append(words[1])

    def hear_ranks(self, _tag: Any, _interrupt: Any) -> Iterator[tuple[int, bytes]]:
        vote = self._heard.pop(0)
        if isinstance(vote, MlxcelError):
            raise vote
        yield 1, vote

    def gather(self, **_how: Any) -> list[bytes]:
        assert self._afterwards is not None
        raise self._afterwards


def run(links: Links, formed: Formed, build: Callable[[], Any] = lambda: mx.zeros(1)) -> Any:
    fabric: Any = links
    inside = stuck.Inside()
    try:
        return MlxCollectives(formed, fabric, inside, "n0", ["n0", "n1"]).run(build)
    finally:
        inside.lost.close()


def raises() -> Any:
    raise ZeroDivisionError("of a prompt's words")


def test_a_step_is_run_when_all_go() -> None:
    formed = Formed("a", "ring", 0, 2, None)
    links = Links(GO)
    assert run(links, formed).item() == 0 and links.told == [GO]


def test_who_fails_before_says_so_and_the_group_stays_whole() -> None:
    formed = Formed("a", "ring", 0, 2, None)
    links = Links()
    with pytest.raises(ZeroDivisionError):
        run(links, formed, raises)
    [vote] = links.told
    assert b"words" not in vote  # that rank is not the leader
    with pytest.raises(PeerAborted, match=r"^n0: left the step"):
        run(Links(vote), formed)
    with pytest.raises(NodeFailed, match=r"^n0: ZeroDivisionError: of a prompt"):
        run(Links(mlx_groups._no(NodeFailed("ZeroDivisionError: of a prompt", node="n0"), in_full=True)), formed)
    assert not formed.broken


def test_who_is_lost_before_all_have_voted_breaks_it() -> None:
    formed = Formed("a", "ring", 0, 2, None)
    with pytest.raises(PeerLost):
        run(Links(PeerLost("silent", node="n1")), formed)
    links = Links()
    with pytest.raises(ClusterError, match=r"^n0: MLX's ring is broken: silent.*Restart the cluster"):
        run(links, formed)
    assert links.told and links.told != [GO]


def test_what_fails_within_breaks_it_and_our_links_say_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLX does when a peer's process ends."""

    def fails(_array: mx.array) -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    monkeypatch.setattr(mx, "eval", fails)
    formed = Formed("a", "ring", 0, 2, None)
    with pytest.raises(PeerLost, match=r"^n1: gone"):
        run(Links(GO, afterwards=PeerLost("gone", node="n1")), formed)
    assert formed.broken
    formed.broken = ""
    with pytest.raises(
        NodeFailed, match=r"^n0: MLX's ring: \[ring\] connection to a peer was lost. Restart the cluster"
    ):
        run(Links(GO, afterwards=StepTimeout("slow")), formed)


def worker() -> Worker:
    def nobody(*_said: Any) -> None:
        pass

    return Worker("n0", Outbox(*[nobody] * 8), threads=1)


def test_only_trouble_makes_a_long_step_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may take its time, and a user may cancel it; a member that is lost is another thing."""
    monkeypatch.setattr("mlxcel_nb.runtime.worker.GRACE_S", 0.05)
    monkeypatch.setattr(stuck, "GRACE_S", 0.05)
    told: list[MlxcelError] = []

    async def watched() -> None:
        mine = worker()
        watch = StuckWatch(mine, told.append)
        mine.enter(1)
        with mine.inside.at("MLX's ring"):
            await asyncio.sleep(0.1)  # longer than the moment it is given
            watch.trouble()
            mine.abort(1, Cancelled("stopped by the user"))
            await asyncio.sleep(0.1)  # the same
            watch.check()
            assert mine.stuck is None and not told
            mine.fail("i", PeerLost("silent for 6 s", node="n1"))
            watch.trouble()
            end = time.monotonic() + 10
            while not told and time.monotonic() < end:
                await asyncio.sleep(0.01)
            with pytest.raises(ClusterError, match=r"^n0: stuck in MLX's ring: n1: silent for 6 s.*Restart"):
                watch.check()
        watch.check()  # it came out after all
        mine.interrupt.close()
        mine.inside.lost.close()

    asyncio.run(watched())
    assert [str(error) for error in told] == ["n1: silent for 6 s"]

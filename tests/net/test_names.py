"""Names behind a real name server, on hosts of their own: slow, flaky and half-wrong ones hold nobody up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.links import resolver
from mlxcel_nb.net.links.sockets import connect
from tests.hosts import hosts
from tests.net.helpers import run

LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 9000)) as server:
    print("ready", flush=True)
    while True:
        server.accept()[0].close()
"""

CONNECT = """
import asyncio, json, sys, time
from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.links.sockets import connect

async def main():
    loop = asyncio.get_running_loop()
    lag = 0.0
    async def tick():
        nonlocal lag
        while True:
            began = loop.time()
            await asyncio.sleep(0.02)  # what is measured is how much later it returns
            lag = max(lag, loop.time() - began - 0.02)
    ticking = asyncio.create_task(tick())
    began = loop.time()
    try:
        async with asyncio.timeout(float(sys.argv[2])):
            (await connect(Address(sys.argv[1], 9000))).close()
            how = "connected"
    except PeerLost as error:
        how = error.cause
    except TimeoutError:
        how = "timed out"
    print(json.dumps([how, loop.time() - began, lag]), flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def pair():
    """a, whose names come from b, where somebody listens on one of two addresses."""
    with hosts(2) as (a, b):
        b.run(["ip", "addr", "add", "10.77.0.50/24", "dev", "eth0"])
        a.resolver(b.address)
        for argv in (["-m", "tests.net.name_server", b.address], ["-c", LISTEN, b.address]):
            process = b.popen([sys.executable, *argv], stdout=subprocess.PIPE, text=True)
            assert process.stdout.readline() == "ready\n"
        yield a, b


def attempt(host, name, seconds=20.0) -> tuple[str, float, float]:
    done = host.python(CONNECT, name, str(seconds))
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize(
    "name",
    [
        "plain-{}.10-77-0-2.test",
        "flaky-{}.10-77-0-2.test",
        "lost-{}.10-77-0-2.test",
        "late6-{}.10-77-0-2.test",
        "two-{}.10-77-0-50_10-77-0-2.test",
        "two-{}.10-77-0-2_10-77-0-50.test",
    ],
)
def test_a_name_in_trouble_is_connected_to_within_2_s(pair, name) -> None:
    """Case 48."""
    a, _ = pair
    tries = []
    for number in range(3):  # a busy machine may be slow once
        how, took, lag = attempt(a, name.format(number))
        assert how == "connected"
        assert lag < 2.0  # a look-up on the loop would stop it for as long as the look-up takes
        tries.append(took)
        if took < 2.0:
            break
    assert min(tries) < 2.0, tries


def test_a_name_server_that_never_answers_does_not_stop_the_loop(pair) -> None:
    """Case 48."""
    a, _ = pair
    how, took, lag = attempt(a, "never.10-77-0-2.test", 1.0)
    assert how == "timed out"
    assert took < 5.0  # the C library alone waits for 10 s and more
    assert lag < 0.9


def test_a_name_nobody_knows_is_offline_with_the_reason(pair) -> None:
    """Case 46."""
    a, _ = pair
    how, _, _ = attempt(a, "none.test")
    assert how.startswith("host none.test:9000 is offline: the name is not known (")


def test_names_and_addresses_that_cannot_be() -> None:
    for host, words in (
        ("a..b", "the name is not known"),
        ("fe80::1%nosuch0", "this host has no interface nosuch0"),
        ("fe80::1", "a link-local address needs the interface"),
    ):
        with pytest.raises(PeerLost, match=words):
            run(connect(Address(host, 9)))


def test_a_thread_may_ask_for_all_names_at_once(pair) -> None:
    """Case 46."""
    found = resolver.lookup_all(["127.0.0.1", "localhost", "nowhere.invalid"], 20.0)
    assert found["127.0.0.1"] == ("127.0.0.1",)
    assert "127.0.0.1" in found["localhost"]
    assert found["nowhere.invalid"] == ()
    assert resolver.lookup_all([], 0.0) == {}
    a, b = pair
    code = "import sys; from mlxcel_nb.net.links.resolver import lookup_all; print(lookup_all(sys.argv[1:], 4.0))"
    done = a.python(code, "plain.10-77-0-2.test", "never.10-77-0-2.test")
    assert done.stdout == f"{{'plain.10-77-0-2.test': ('{b.address}',), 'never.10-77-0-2.test': ()}}\n", done.stderr

"""The hosts that other tests stand on: they reach each other, lose packets in silence, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests import hosts as module
from tests.hosts import existing, hosts
from tests.waiting import started, until

LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family) as server:
    server.bind((sys.argv[1], 4000))
    server.listen()
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        while data := connection.recv(65536):
            connection.sendall(data)
"""


def echo(host, address):
    server = host.popen([sys.executable, "-c", LISTEN, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "ready\n"
    return server


def reaches(host, address, within=2.0) -> bool:
    with host.inside():
        try:
            socket.create_connection((address, 4000), timeout=within).close()
        except OSError:
            return False
    return True


def test_hosts_reach_each_other_by_every_address_and_nothing_else() -> None:
    with hosts(3) as (a, b, c):
        assert (a.name, b.name, c.name) == ("a", "b", "c")
        echo(b, "::")  # IPv4 as well: bindv6only is off
        for address in (b.address, b.address6, f"{b.link_local}%eth0"):
            assert reaches(a, address, 10)
            assert reaches(c, address, 10)
        assert a.run(["ip", "route", "show", "default"]).stdout == ""
        with a.inside():
            assert b.address != a.address
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(("127.0.0.1", 4000), timeout=5)


def test_a_cut_is_silent_and_mends() -> None:
    with hosts(3) as (a, b, c):
        echo(b, "0.0.0.0")
        with a.inside():
            line = socket.create_connection((b.address, 4000), timeout=10)
        with line:
            line.settimeout(10)
            line.sendall(b"one")
            assert line.recv(10) == b"one"
            b.cut_from(a)
            line.sendall(b"two")  # no error: the packet is lost on the way
            line.settimeout(0.5)
            with pytest.raises(TimeoutError):
                line.recv(10)
            assert reaches(c, b.address, 10)
            b.cut()
            assert not reaches(c, b.address, 0.5)
            b.mend()
            line.settimeout(20)
            assert line.recv(10) == b"two"  # TCP sends it again
        assert reaches(c, b.address, 10)


def test_links_are_cut_one_by_one() -> None:
    with hosts(2, links=("eth0", "tb0")) as (a, b):
        echo(b, "0.0.0.0")
        assert a.addresses["eth0"] != a.addresses["tb0"]
        a.cut("tb0")
        assert reaches(a, b.addresses["eth0"], 10)
        assert not reaches(a, b.addresses["tb0"], 0.5)
        a.mend("tb0")
        a.down("eth0")
        assert until(lambda: '"NO-CARRIER"' in a.run(["ip", "-j", "link", "show", "eth0"]).stdout)
        assert reaches(a, b.addresses["tb0"], 10)


def test_a_rate_limit_slows_both_ways() -> None:
    with hosts(2) as (a, b):
        echo(b, "0.0.0.0")
        a.limit("4mbit")
        start = time.monotonic()
        data = bytes(500_000)  # 1 s each way at 4 Mbit/s, less the burst
        with a.inside(), socket.create_connection((b.address, 4000), timeout=10) as line:
            line.settimeout(30)
            got = 0
            for chunk in range(0, len(data), 50_000):
                line.sendall(data[chunk : chunk + 50_000])
            while got < len(data):
                got += len(line.recv(65536))
        assert time.monotonic() - start > 0.8
        a.limit(None)


def test_names_and_name_servers_are_a_hosts_own() -> None:
    with hosts(2) as (a, b):
        a.resolver(None, {"mac1": b.address})
        found = a.python("import socket; print(socket.gethostbyname('mac1'))")
        assert found.stdout.strip() == b.address, found.stderr


def test_processes_and_namespaces_go_with_the_set_even_when_the_test_fails() -> None:
    with pytest.raises(ZeroDivisionError), hosts(2) as (a, b):
        process = a.popen(["sleep", "100"])
        names = {a.namespace, b.namespace}
        assert names <= set(existing())
        raise ZeroDivisionError
    assert process.poll() == -signal.SIGKILL
    assert not names & set(existing())


def test_what_a_killed_run_left_is_removed_by_the_next(monkeypatch) -> None:
    code = "from tests.hosts import hosts\nwith hosts(2) as h: print(h[0].namespace, flush=True); input()"
    with hosts(1), started([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as run:
        name = run.stdout.readline().strip()
        assert name in existing()
        monkeypatch.setattr(module, "_swept", False)
        module._sweep()
        assert name in existing()  # it lives, so its set is its own
        os.kill(run.pid, signal.SIGKILL)
        run.wait(10)
        monkeypatch.setattr(module, "_swept", False)
        module._sweep()
        assert name not in existing()


def test_a_machine_that_cannot_play_hosts_says_why(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("MLXCEL_NB_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="need root"), hosts(2):  # what is tested is leaving out
        pass
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="need root"), hosts(2):
        pass

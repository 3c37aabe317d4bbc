"""The second implementation and the commands talk: both roles, both suites, through rekeys, with either secret."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.peer import codec, ends
from tests.peer.codec import Broken
from tests.peer.ends import OLDER, SECRET, STRANGER, SUITES
from tests.peer.peer import Frame, Peer, Rejected

MIB = 1 << 20


def talk(peer: Peer) -> None:
    """Pings of many sizes, up to 8 under way, until both sides have changed their keys three times."""
    for filler in (0, 1, 64, 70_000, MIB):
        for _ in range(2):
            for _ in range(8):
                peer.ping(os.urandom(filler))
            for _ in range(8):
                peer.pong()
    assert peer.out.rekeys >= 3 and peer.into.rekeys >= 3


@pytest.mark.parametrize("suite", SUITES)
def test_a_client_of_another_make_pings_a_listener_through_rekeys(suite: int, files: dict[str, str]) -> None:
    with (
        ends.net_listen(files, "--suite", SUITES[suite], "--rekey-every", "5") as listener,
        listener.dial(suite=suite, rekey_every=7) as peer,
    ):
        talk(peer.be_client())
        peer.rekey()  # two in a row are two changes of keys
        peer.rekey()
        peer.ping()
        peer.pong()
        assert peer.close("enough") is not None
        listener.command.process.terminate()
        assert listener.command.end() == 0


@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("size", [0, 64, MIB])
def test_a_server_of_another_make_is_pinged_through_rekeys(suite: int, size: int, files: dict[str, str]) -> None:
    options = ("--suite", SUITES[suite], "--rekey-every", "5", "--size", str(size), "--count", "30", "--json")
    with ends.net_ping(files, *options) as (ping, server), ends.accept(server, suite=suite, rekey_every=4) as peer:
        peer.be_server()
        assert re.fullmatch(r"ping-[0-9a-f]{8}", str(peer.other.node_id))
        heard = list(peer.frames())
        assert [frame.kind for frame in heard] == [codec.CLOSE], heard
        peer.farewell("goodbye")
        assert ping.end() == 0, ping.text
        assert peer.out.rekeys >= 3 and peer.into.rekeys >= 3
        told = json.loads(ping.text)
        assert str(peer.hello.node_id) in json.dumps(told)


def test_pings_of_the_other_make_are_answered_while_it_waits_for_pongs(files: dict[str, str]) -> None:
    """Both sides ping at once: `net ping` answers in the middle of its own measurement."""
    with ends.net_ping(files, "--count", "20") as (ping, server), ends.accept(server) as peer:
        peer.be_server()
        answered = 0
        while (frame := peer.next_frame()).kind != codec.CLOSE:
            if frame.kind == codec.PING:
                if len(peer.unanswered) < 8:
                    peer.ping(b"x" * 100)
                peer.send(codec.PONG, frame.channel, frame.payload)
            else:
                assert frame == Frame(codec.PONG, 0, peer.unanswered.pop(0))
                answered += 1
        peer.farewell()
        assert ping.end() == 0 and answered >= 10


def test_a_listener_drops_what_is_no_ping_and_grants_credit_for_it(listener: ends.Listener) -> None:
    """More frames of kinds 4 to 6 than a channel begins with: a credit comes in time, on the channel it is for."""
    with listener.dial(rekey_every=50) as peer:
        peer.be_client()
        for number in range(200):
            for kind, channel in ((codec.TENSOR, 1), (codec.KV, 3), (codec.STREAM, 1)):
                while not peer.credit[channel]:
                    peer.ping()
                    peer.pong()
                peer.send(kind, channel, os.urandom(number))
            peer.send(codec.CONTROL, 0, b"\x80")
        peer.ping()
        peer.pong()
        assert set(peer.credit) == {1, 3}
        peer.close("done")


def test_many_clients_at_once_have_keys_of_their_own(listener: ends.Listener) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(listener.dial()) for _ in range(12)]
        for step in (Peer.say_client_hello, Peer.hear_server_hello, Peer.say_client_proof, Peer.hear_verdict):
            for peer in peers:
                step(peer)
        for peer in peers:
            peer.greet()
            peer.ping(b"a")
        for peer in peers:
            peer.pong()
        assert len({peer.out.key for peer in peers} | {peer.into.key for peer in peers}) == 2 * len(peers)
        assert len({peer.other.nonce for peer in peers}) == len({peer.other.x25519 for peer in peers}) == len(peers)
        assert len({peer.other.incarnation for peer in peers}) == 1


# --------------------------------------------------------------------------------------------- two secrets


@pytest.mark.parametrize("secret", [SECRET, OLDER])
def test_a_listener_with_two_secrets_takes_either(secret: bytes, listener: ends.Listener) -> None:
    with listener.dial(secret, rekey_every=6) as peer:
        talk(peer.be_client())


def test_a_listener_takes_no_third_secret(listener: ends.Listener) -> None:
    with listener.dial(STRANGER) as peer, pytest.raises(Rejected) as rejected:
        peer.be_client()
    assert rejected.value.code == 6
    listener.command.wait_for("authentication failed")


@pytest.mark.parametrize("by_reject", [True, False], ids=["Reject 6", "closed"])
def test_ping_tries_the_older_secret_once(by_reject: bool, files: dict[str, str]) -> None:
    with ends.net_ping(files, "--previous-secret-file", files["older"]) as (ping, server):
        with ends.accept(server, OLDER) as peer, pytest.raises(Broken, match="proof"):
            try:
                peer.be_server()
            except Broken:
                if by_reject:
                    peer.reject(6, "authentication failed")
                raise
        with ends.accept(server, OLDER) as peer:
            assert [frame.kind for frame in peer.be_server().frames()] == [codec.CLOSE]
            peer.farewell()
        assert ping.end() == 0, ping.text


@pytest.mark.parametrize("options", [(), ("--previous-secret-file", "older")], ids=["one secret", "two"])
def test_a_ping_that_no_secret_fits_ends_with_authentication_failed(options: tuple, files: dict[str, str]) -> None:
    with ends.net_ping(files, *(files.get(word, word) for word in options)) as (ping, server):
        for _ in range(1 + bool(options)):
            with ends.accept(server, STRANGER) as peer:
                with pytest.raises(Broken, match="proof"):
                    peer.be_server()
                peer.reject(6)
        assert ping.end() != 0
        assert "authentication failed" in ping.text
        server.settimeout(0.5)  # what does not come cannot be waited for
        with pytest.raises(TimeoutError):
            server.accept()


def test_a_server_of_another_make_that_knows_two_secrets_takes_both_pings(files: dict[str, str]) -> None:
    for mine in ("secret", "older"):
        with (
            ends.net_ping({"secret": files[mine]}) as (ping, server),
            ends.accept(server, SECRET, older=OLDER) as peer,
        ):
            assert [frame.kind for frame in peer.be_server().frames()] == [codec.CLOSE]
            peer.farewell()
            assert ping.end() == 0, ping.text


def test_a_running_listener_reads_its_secret_again_on_sighup(tmp_path: Path) -> None:
    """Case 50: the file has a new secret; the one before is good until the next SIGHUP."""
    files = ends.secret_files(tmp_path)
    with ends.net_listen(files) as listener:
        Path(files["secret"]).write_bytes(OLDER)
        listener.process.send_signal(signal.SIGHUP)
        listener.command.wait_for("the cluster secret is a new one, and the one before is good until the next SIGHUP")
        for secret in (SECRET, OLDER):
            with listener.dial(secret) as peer:
                peer.be_client()
        listener.process.send_signal(signal.SIGHUP)
        listener.command.wait_for("the cluster secret is the same, and no other is good")
        with listener.dial(SECRET) as peer, pytest.raises(Rejected):
            peer.be_client()
        Path(files["secret"]).chmod(0o644)
        listener.process.send_signal(signal.SIGHUP)
        listener.command.wait_for("the cluster secret stays as it is: .* may be read by others")
        with listener.dial(OLDER) as peer:
            peer.be_client()


def test_while_a_secret_is_replaced_every_pair_can_talk_but_old_and_new_alone(files: dict[str, str]) -> None:
    """Case 50: the steps of a rotation, as docs/security.md has them: old, then both, then new, host by host."""
    stages = {
        "old": (files["older"],),
        "both": (files["secret"], "--previous-secret-file", files["older"]),
        "new": (files["secret"],),
    }
    talked = set()
    for listens, (secret, *more) in stages.items():
        with ends.net_listen({"secret": secret}, *more) as listener:
            host, port = listener.address
            for pings, (own, *others) in stages.items():
                arguments = ("net", "ping", "--secret-file", own, *others, "--count", "1", f"{host}:{port}")
                with ends.command(*arguments) as ping:
                    status = ping.end()
                    assert status == 0 or "authentication failed" in ping.text, ping.text
                    if not status:
                        talked.add((listens, pings))
    assert talked == {(a, b) for a in stages for b in stages if {a, b} != {"old", "new"}}

"""Who was heard, as people read it."""

from __future__ import annotations

from dataclasses import replace

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.display.network import discovered_view
from mlxcel_nb.net.discovery.findings import Findings
from mlxcel_nb.net.discovery.sightings import Heard, Sighting

NODE = Sighting(
    node_id="mac-1", role="hybrid", incarnation=b"\xab" * 16, addresses=(Address("10.0.0.1", 9000),),
    paths=(Heard("en0", "broadcast"), Heard("en5", "IPv6"), Heard("en0", "multicast")), clock_s=-0.1, first=1.0,
    last=9.0,
)  # fmt: skip
FOUND = Findings(
    nodes=(NODE,), clocks={}, foreign=0, elsewhere=0, replayed=0, malformed=0, crowded=0, troubles=(),
    interfaces=("en0", "lo0"), now=9.5,
)  # fmt: skip


def text(**changes: object) -> str:
    return discovered_view(replace(FOUND, **changes), cluster="lab", seconds=5.0).text


def test_a_node_is_a_row_with_its_paths_by_interface() -> None:
    title, heads, row = text().splitlines()
    assert title == "Nodes of cluster lab"
    assert heads.split() == ["node", "role", "addresses", "heard", "by", "age", "clock", "process"]
    assert row.split("  ")[0] == "mac-1"
    assert "en0 (broadcast, multicast), en5 (IPv6)" in row and "0.5 s" in row and "right" in row
    assert row.endswith("abababab")


def test_nothing_heard_says_what_to_check() -> None:
    said = text(nodes=())
    assert "Nothing was heard in 5 s on en0, lo0" in said
    assert "UDP port 49555" in said and "cluster name and secret" in said


def test_wrong_clocks_are_said_and_when_all_agree_this_one_is_suspected() -> None:
    said = text(nodes=(), clocks={"a": 45.2, "b": 44.0})
    assert "Not listed: a; its clock is 45 seconds ahead of this one." in said
    assert "the clock of this machine" in said
    said = text(clocks={"a": -3600.0})
    assert "3600 seconds behind this one, or somebody replays an old recording" in said
    assert "this machine" not in said
    assert "12 s ahead" in text(nodes=(replace(NODE, clock_s=12.0),))


def test_counts_troubles_and_rivals_are_notes() -> None:
    said = text(
        nodes=(replace(NODE, rivals=1),), foreign=3, elsewhere=1, crowded=7,
        troubles=("cannot send by en9 broadcast: Network is down",),
    )  # fmt: skip
    assert "3 made with another secret, or no beacons; 1 of other clusters with the same secret; 7 not looked" in said
    assert "mac-1 is announced by 2 processes" in said
    assert "Note: this host cannot send by en9 broadcast: Network is down." in said


def test_what_members_say_of_themselves_cannot_write_html_or_steer_a_terminal() -> None:
    view = discovered_view(replace(FOUND, nodes=(replace(NODE, node_id="<b>\u202ex"),)), cluster="lab", seconds=5.0)
    assert "<b>" not in view.html and "&lt;b&gt;" in view.html
    assert "\u202e" not in view.text


def test_with_a_secret_that_no_other_host_can_know_the_advice_is_to_give_one() -> None:
    view = discovered_view(replace(FOUND, nodes=()), cluster="lab", seconds=5.0, private=True)
    assert "no other host can know" in view.text and "give --secret-file and --cluster" in view.text
    assert "firewalls" not in view.text


def test_a_count_of_what_cannot_be_read_is_a_whole_sentence() -> None:
    line = text(malformed=2).splitlines()[-1]
    assert line == "Other datagrams: 2 of members, but not readable (of another version, perhaps)."

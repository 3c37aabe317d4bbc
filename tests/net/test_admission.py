"""One node id is one process at one address at a time."""

from __future__ import annotations

import pytest

from mlxcel_nb.net.links.admission import Admission
from mlxcel_nb.wire.hello import VerdictCode

FIRST, SECOND = b"\1" * 16, b"\2" * 16


@pytest.fixture
def admission() -> Admission[str]:
    admission: Admission[str] = Admission()
    admission.enter("link-1", "worker-0", FIRST, "203.0.113.1")
    return admission


def verdict(admission: Admission[str], node_id: str, incarnation: bytes, source: str) -> VerdictCode:
    return admission.ask(node_id, incarnation, source).verdict


def test_a_new_id_is_admitted_from_anywhere():
    assert verdict(Admission(), "worker-0", FIRST, "203.0.113.1") is VerdictCode.ACCEPTED


def test_the_same_process_may_hold_several_connections(admission):
    assert verdict(admission, "worker-0", FIRST, "203.0.113.1") is VerdictCode.ACCEPTED
    admission.enter("link-2", "worker-0", FIRST, "203.0.113.1")
    assert admission.holding("worker-0") == {"link-1", "link-2"}
    assert len(admission) == 2


def test_the_first_address_holds_as_long_as_the_process_lives(admission):
    decision = admission.ask("worker-0", FIRST, "203.0.113.2")
    assert (decision.verdict, decision.contested) == (VerdictCode.IDENTITY, False)
    assert "203.0.113.1" in decision.detail
    assert "203.0.113.2" in decision.detail
    admission.leave("link-1")
    assert verdict(admission, "worker-0", FIRST, "203.0.113.2") is VerdictCode.ACCEPTED


def test_ipv4_mapped_into_ipv6_is_ipv4(admission):
    assert verdict(admission, "worker-0", FIRST, "::ffff:203.0.113.1") is VerdictCode.ACCEPTED


def test_another_process_at_the_same_address_is_a_duplicate_while_the_first_lives(admission):
    decision = admission.ask("worker-0", SECOND, "203.0.113.1")
    assert (decision.verdict, decision.contested) == (VerdictCode.DUPLICATE, True)
    admission.leave("link-1")
    assert verdict(admission, "worker-0", SECOND, "203.0.113.1") is VerdictCode.ACCEPTED


def test_another_process_at_another_address_is_a_wrong_identity_while_the_first_lives(admission):
    decision = admission.ask("worker-0", SECOND, "203.0.113.2")
    assert (decision.verdict, decision.contested) == (VerdictCode.IDENTITY, True)
    admission.leave("link-1")
    assert verdict(admission, "worker-0", SECOND, "203.0.113.2") is VerdictCode.ACCEPTED


def test_an_id_is_held_until_its_last_connection_ends(admission):
    admission.enter("link-2", "worker-0", FIRST, "203.0.113.1")
    admission.leave("link-1")
    admission.leave("link-1")
    assert verdict(admission, "worker-0", SECOND, "203.0.113.1") is VerdictCode.DUPLICATE
    assert admission.holding("worker-0") == {"link-2"}


def test_configured_addresses_are_the_only_ones():
    admission: Admission[str] = Admission({"worker-0": ["203.0.113.1", "2001:db8::1"]})
    assert verdict(admission, "worker-0", FIRST, "203.0.113.1") is VerdictCode.ACCEPTED
    assert verdict(admission, "worker-0", FIRST, "2001:DB8:0::1") is VerdictCode.ACCEPTED
    assert verdict(admission, "worker-0", FIRST, "203.0.113.2") is VerdictCode.IDENTITY
    assert verdict(admission, "worker-9", FIRST, "203.0.113.2") is VerdictCode.ACCEPTED


def test_a_configured_id_may_use_all_its_addresses_at_once():
    admission: Admission[str] = Admission({"worker-0": ["203.0.113.1", "203.0.113.2"]})
    admission.enter("link-1", "worker-0", FIRST, "203.0.113.1")
    assert verdict(admission, "worker-0", FIRST, "203.0.113.2") is VerdictCode.ACCEPTED
    assert verdict(admission, "worker-0", SECOND, "203.0.113.2") is VerdictCode.DUPLICATE


def test_established_connections_have_their_own_limit():
    admission: Admission[str] = Admission(limit=1)
    admission.enter("link-1", "worker-0", FIRST, "203.0.113.1")
    assert verdict(admission, "worker-1", FIRST, "203.0.113.2") is VerdictCode.CAPACITY


def test_a_plan_names_further_addresses_for_as_long_as_it_holds():
    admission: Admission[str] = Admission({"configured": ["203.0.113.1"]})
    admission.enter("link-1", "seen", FIRST, "203.0.113.1")
    for node_id in ("configured", "seen"):
        assert verdict(admission, node_id, FIRST, "192.0.2.1") is VerdictCode.IDENTITY
    admission.allow({"configured": ["::ffff:192.0.2.1"], "seen": ["192.0.2.1"]})
    for node_id in ("configured", "seen"):
        assert verdict(admission, node_id, FIRST, "192.0.2.1") is VerdictCode.ACCEPTED
        assert verdict(admission, node_id, FIRST, "192.0.2.2") is VerdictCode.IDENTITY
    admission.allow({})
    assert verdict(admission, "seen", FIRST, "192.0.2.1") is VerdictCode.IDENTITY


def test_a_process_may_come_from_every_address_it_has_announced():
    admission: Admission[str] = Admission({"configured": ["203.0.113.1"]})
    for node_id in ("configured", "seen"):
        admission.enter(f"link of {node_id}", node_id, FIRST, "203.0.113.1")
        admission.announce(node_id, SECOND, ["192.0.2.1"])  # another process has no say
        assert verdict(admission, node_id, FIRST, "192.0.2.1") is VerdictCode.IDENTITY
        admission.announce(node_id, FIRST, ["::ffff:192.0.2.1", "no address", 7, None])
    assert verdict(admission, "configured", FIRST, "192.0.2.1") is VerdictCode.IDENTITY
    assert verdict(admission, "seen", FIRST, "192.0.2.1") is VerdictCode.ACCEPTED
    assert verdict(admission, "seen", FIRST, "203.0.113.1") is VerdictCode.ACCEPTED
    assert verdict(admission, "seen", SECOND, "192.0.2.1") is VerdictCode.DUPLICATE
    admission.announce("seen", FIRST, ["192.0.2.9"])
    assert verdict(admission, "seen", FIRST, "192.0.2.1") is VerdictCode.IDENTITY


def test_what_was_announced_ends_with_the_last_connection():
    admission: Admission[str] = Admission()
    admission.enter("link-1", "seen", FIRST, "203.0.113.1")
    admission.announce("seen", FIRST, ["192.0.2.1"])
    admission.leave("link-1")
    admission.announce("seen", FIRST, ["192.0.2.1"])  # nobody holds the id now
    admission.enter("link-2", "seen", FIRST, "203.0.113.1")
    assert verdict(admission, "seen", FIRST, "192.0.2.1") is VerdictCode.IDENTITY

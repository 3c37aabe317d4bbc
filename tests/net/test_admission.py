"""One node id is one process at one address at a time."""

from __future__ import annotations

import pytest

from mlxcel_nb.net.admission import Admission, Answer

FIRST, SECOND = b"\1" * 16, b"\2" * 16


@pytest.fixture
def admission() -> Admission:
    admission = Admission()
    admission.enter("link-1", "worker-0", FIRST, "203.0.113.1")
    return admission


def test_a_new_id_is_admitted_from_anywhere():
    assert Admission().ask("worker-0", FIRST, "203.0.113.1").answer is Answer.ADMIT


def test_the_same_process_may_hold_several_connections(admission):
    assert admission.ask("worker-0", FIRST, "203.0.113.1").answer is Answer.ADMIT
    admission.enter("link-2", "worker-0", FIRST, "203.0.113.1")
    assert admission.holding("worker-0") == {"link-1", "link-2"}
    assert len(admission) == 2


def test_the_first_address_holds_as_long_as_the_process_lives(admission):
    decision = admission.ask("worker-0", FIRST, "203.0.113.2")
    assert decision.answer is Answer.IDENTITY
    assert "203.0.113.1" in decision.detail
    assert "203.0.113.2" in decision.detail
    admission.leave("link-1", "worker-0")
    assert admission.ask("worker-0", FIRST, "203.0.113.2").answer is Answer.ADMIT


def test_an_address_the_peer_announced_is_its_own_too(admission):
    admission.announce("worker-0", ["203.0.113.2"])
    assert admission.ask("worker-0", FIRST, "203.0.113.2").answer is Answer.ADMIT


def test_ipv4_mapped_into_ipv6_is_ipv4(admission):
    assert admission.ask("worker-0", FIRST, "::ffff:203.0.113.1").answer is Answer.ADMIT


def test_another_incarnation_is_a_matter_of_a_ping(admission):
    assert admission.ask("worker-0", SECOND, "203.0.113.1").answer is Answer.PROBE
    admission.leave("link-1", "worker-0")
    assert admission.ask("worker-0", SECOND, "203.0.113.1").answer is Answer.ADMIT


def test_a_late_farewell_of_the_old_incarnation_leaves_the_new_one_alone(admission):
    admission.enter("link-2", "worker-0", SECOND, "203.0.113.7")
    admission.leave("link-1", "worker-0")
    assert admission.holding("worker-0") == {"link-2"}


def test_configured_addresses_are_the_only_ones():
    admission = Admission(configured={"worker-0": ["203.0.113.1", "2001:db8::1"]})
    assert admission.ask("worker-0", FIRST, "203.0.113.1").answer is Answer.ADMIT
    assert admission.ask("worker-0", FIRST, "2001:DB8:0::1").answer is Answer.ADMIT
    assert admission.ask("worker-0", FIRST, "203.0.113.2").answer is Answer.IDENTITY
    assert admission.ask("worker-9", FIRST, "203.0.113.2").answer is Answer.ADMIT


def test_a_configured_id_may_use_all_its_addresses_at_once():
    admission = Admission(configured={"worker-0": ["203.0.113.1", "203.0.113.2"]})
    admission.enter("link-1", "worker-0", FIRST, "203.0.113.1")
    assert admission.ask("worker-0", FIRST, "203.0.113.2").answer is Answer.ADMIT


def test_established_connections_have_their_own_limit():
    admission = Admission(limit=1)
    admission.enter("link-1", "worker-0", FIRST, "203.0.113.1")
    assert admission.ask("worker-1", FIRST, "203.0.113.2").answer is Answer.CAPACITY

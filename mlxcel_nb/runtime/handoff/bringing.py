"""Has prompts read by other instances, and goes on when what they read is here: a leader's part. On the MLX thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError, StepTimeout, WireError
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.fetches import Fetch, Fetches, first_of
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Sequence
from mlxcel_nb.scheduling.step_plan import StepPlan
from mlxcel_nb.util.log import get_logger

if TYPE_CHECKING:
    from mlxcel_nb.runtime.active import Active
    from mlxcel_nb.runtime.commands import Brought, Landed
    from mlxcel_nb.runtime.engine import Engine
    from mlxcel_nb.runtime.instance import Instance
    from mlxcel_nb.runtime.worker import Worker

log = get_logger("runtime.handoff")


class Bringing:
    """Of one engine."""

    def __init__(self, engine: Engine, worker: Worker, instance: Instance, scheduler: Scheduler) -> None:
        self._engine = engine
        self._worker = worker
        self._instance = instance
        self._scheduler = scheduler
        layout = instance.layout
        self._fetches = Fetches(
            instance.order.instance, worker.outbox.to_reader,
            members=layout.size if layout.ep == 1 else 1, patience_s=instance.order.step_s,
        )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._fetches)

    def wanted(self, active: Active) -> bool:
        """Whether somebody else is to read a request's prompt: not one of which little is to be read."""
        handoff, readers = self._instance.handoff, active.command.order.readers
        if handoff is None or not readers:
            return False
        known = {peer.instance for peer in handoff.order.readers}
        active.readers = [each for each in readers if each in known]
        tokens = [*active.prompt, *(active.command.order.made or ())]
        to_read = len(tokens) - self._scheduler.kept(tokens)
        return bool(active.readers) and to_read >= handoff.order.least

    def begin(self, plan: StepPlan, epoch: int) -> None:
        """Ask for what a plan expects, now that all members have been told of it."""
        for expect in plan.expect:
            if (active := self._engine.active(expect.sequence)) is None:
                continue
            sequence = active.sequence
            assert sequence is not None
            made = expect.length - len(active.prompt)
            if not active.readers or (made and active.command.order.forced is not None):
                self._scheduler.read_here(sequence)
                continue
            order, reader = active.command.order, active.readers[0]
            fetch = self._fetches.begin(order, active.prompt, sequence, expect.transfer, epoch, reader)
            self._engine.begun(active, fetch.asked_s, plan.step)
            active.fetch = fetch

    def drop(self, sequence: Sequence) -> None:
        """Nobody waits for it any more."""
        self._fetches.drop(sequence)

    def leave(self) -> None:
        """The epoch is over, and with it all that was expected."""
        self._fetches.drop_all()

    def look(self, now: float) -> None:
        """Give readers up that say nothing."""
        for fetch in self._fetches.late(now):
            self._again(fetch, StepTimeout(f"not heard of for {now - fetch.heard_s:.0f} s"))

    # -- what comes

    def brought(self, command: Brought) -> None:
        """A frame of a reader's."""
        message = command.message
        fetch = self._fetches.of(str(message.get("id")))
        if fetch is None:
            return
        fetch.heard_s = time.monotonic()
        try:
            self._take(fetch, message)
        except Exception as caught:  # noqa: BLE001  # whatever a reader says, somebody else can read
            self._again(fetch, errors.wrap(caught, self._worker.node_id))

    def _take(self, fetch: Fetch, message: dict[str, Any]) -> None:
        kind, active = message.get("type"), self._engine.active(fetch.sequence.number)
        if active is None or fetch.sequence.transfer != fetch.transfer:  # it has gone on, or is not waited for
            if kind == "end":
                self._fetches.over(fetch)
                if message.get("error") is None:
                    fetch.account = Account.from_list(message.get("handed"))
        elif kind == "prefill":
            if fetch.first_s is None:
                done, total = field(message, "done", int), field(message, "total", int)
                news = {"type": "prefill", "id": active.command.order.id, "done": done, "total": total}
                self._worker.outbox.stream(news)
        elif kind == "first" and fetch.first_s is None:
            self._first(fetch, active, message, fetch.heard_s)
        elif kind == "end":
            self._ended(fetch, message)
        else:
            raise WireError(f"{kind!r:.20} of whoever reads a prompt")

    def landed(self, command: Landed, epoch: int) -> None:
        """A member has all that was expected of a transfer."""
        fetch = self._fetches.at(command.transfer)
        if fetch is not None and command.epoch == epoch and self._fetches.landed(fetch, command.node_id):
            self._settle(fetch)

    def _first(self, fetch: Fetch, active: Active, message: dict[str, Any], now: float) -> None:
        """The token that follows the prompt: it is told at once."""
        sampled = first_of(message)
        if not 0 <= sampled.token < self._instance.part.vocab_size:
            raise WireError(f"token id {sampled.token} is outside the model's vocabulary")
        fetch.first_s, fetch.reused = now, int(field(message, "reused", int))
        self._scheduler.made_elsewhere(fetch.sequence, sampled.token)
        self._engine.say(active, sampled, now)
        self._settle(fetch)

    def _ended(self, fetch: Fetch, message: dict[str, Any]) -> None:
        """The reader's last word."""
        if (told := message.get("error")) is not None:
            raise errors.from_dict(told)
        if fetch.first_s is None:
            raise WireError("whoever reads a prompt has not said what follows it")
        fetch.account = Account.from_list(message.get("handed"))
        self._settle(fetch)

    def _settle(self, fetch: Fetch) -> None:
        """Go on, if all is there."""
        if fetch.first_s is not None and fetch.landed_s is not None and fetch.sequence.transfer == fetch.transfer:
            self._scheduler.landed(fetch.sequence)
            if fetch.account is not None:
                self._fetches.over(fetch)

    def _again(self, fetch: Fetch, error: MlxcelError) -> None:
        """Have somebody else read it, or read it here."""
        if fetch.sequence.transfer != fetch.transfer or (fetch.landed_s is not None and fetch.first_s is not None):
            self._fetches.over(fetch)  # it has gone on
            return
        log.info("a prompt is not read elsewhere: %s", error)
        self._fetches.drop(fetch.sequence)
        active = self._engine.active(fetch.sequence.number)
        if active is None:
            return
        active.readers = [each for each in active.readers if each != fetch.reader]
        self._engine.ledger.counts.reread += 1
        if active.readers:
            self._scheduler.expect_again(fetch.sequence)
        else:
            self._scheduler.read_here(fetch.sequence)


def facts(fetch: Fetch | None, second_s: float | None) -> dict[str, Any]:
    """What there is to say of how a prompt was read elsewhere; nothing, where it was not.

    Args:
        second_s: when the first token came that was made here.
    """
    if fetch is None or fetch.first_s is None or fetch.landed_s is None:
        return {}
    account = fetch.account
    told: dict[str, Any] = {
        "prefill_s": fetch.first_s - fetch.asked_s,
        "transfer_s": max(0.0, fetch.landed_s - fetch.first_s),
    }
    if second_s is not None:
        told["decode_s"] = second_s - max(fetch.first_s, fetch.landed_s)
    if account is not None:
        hidden = account.before / account.sent if account.sent else 0.0
        told |= {
            "transfer_bytes": account.nbytes, "transfer_sent_bytes": account.sent, "transfer_hidden": hidden,
            "transfer_error": account.error, "transfer_encoding": account.encoding,
        }  # fmt: skip
    return {"handoff": told}

"""The coordinator of a loaded model, on member 0: it asks the scheduler what to run, has everybody run it, and makes
answers of the tokens.

Runs on the MLX thread. Decisions are `scheduling.Scheduler`'s; here is what acts: plans go out over the hot links,
tokens come back, text goes to the routers through the worker's outbox. Several steps may be under way at once, one in
each stage; their results come in order.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxcel_nb import errors
from mlxcel_nb.errors import Busy, Cancelled, MlxcelError, PeerLost, RequestError, StepTimeout, WireError
from mlxcel_nb.models.constraints import check as check_constraint
from mlxcel_nb.models.ending import Ending
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.models.text import Detokenizer, StopStrings
from mlxcel_nb.runtime.active import Active, limits_of
from mlxcel_nb.runtime.answers import Answer, Clock
from mlxcel_nb.runtime.commands import Brought, Landed, Sent
from mlxcel_nb.runtime.engine_facts import Ledger
from mlxcel_nb.runtime.execution import Execution
from mlxcel_nb.runtime.handoff.bringing import Bringing, facts
from mlxcel_nb.runtime.handoff.handing import Handing
from mlxcel_nb.runtime.instance import Instance
from mlxcel_nb.runtime.kv_leader import Kept
from mlxcel_nb.runtime.outcomes import Outcome, doing, heard
from mlxcel_nb.runtime.protocol import GenerateOrder, OpenOrder
from mlxcel_nb.runtime.recording import check_room
from mlxcel_nb.runtime.spans import Kind
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Request
from mlxcel_nb.scheduling.step_plan import StepPlan
from mlxcel_nb.util.log import get_logger, trail

if TYPE_CHECKING:
    from mlxcel_nb.runtime.commands import Generate
    from mlxcel_nb.runtime.worker import Worker

log = get_logger("runtime.engine")

LOOK_S = 0.2
"""Between two looks at what others are to bring, while there is nothing else to do."""

LAST_WORD_S = 10.0
"""For a follower to take the end of an epoch; one that does not is given up: a stopped one is dead by then anyway."""


@dataclass(frozen=True)
class Flight:
    """A step that everybody has been told of, and what this member sampled in it."""

    plan: StepPlan
    outcome: Outcome
    began: float


class Engine:
    """Runs requests on a loaded instance, as many at once as there is room for.

    Attributes:
        ledger: what it has to do and has done; its facts are for any thread.
        kept: what of it may be saved, and what is being loaded.
        bringing, handing: what other instances read for this one, and it for them.
    """

    def __init__(self, worker: Worker, instance: Instance, order: OpenOrder) -> None:
        self._worker = worker
        self._instance = instance
        self._tokenizer = instance.tokenizer
        self._context = model_info(instance.order.model).context
        self._scheduler = Scheduler(limits_of(instance, order.rooms, self._context))
        self._flights: deque[Flight] = deque()
        self._active: dict[int, Active] = {}
        self._epoch = 0
        self._execution: Execution | None = None
        self._result = 0.0
        self._spans = instance.fabric.spans
        self.ledger = Ledger(self._scheduler, self._spans)
        self.kept = Kept(self._scheduler, instance.part)
        self.bringing = Bringing(self, worker, instance, self._scheduler)
        self.handing = Handing(self, worker, instance)
        self._resting = False

    @property
    def busy(self) -> bool:
        """Whether there is anything to do without being asked."""
        return not self._scheduler.idle

    @property
    def patience_s(self) -> float:
        """How long a command may be waited for before `advance` is called again; 0 while there are steps to run."""
        return LOOK_S if self._resting and self.bringing else 0.0

    def stir(self) -> None:
        """Something is about to change."""
        self._resting = False

    @property
    def execution(self) -> Execution | None:
        """The epoch under way, if one is."""
        return self._execution

    # -- requests come and go ---------------------------------------------------------------------

    def add(self, command: Generate) -> None:
        """Take a request. Whatever becomes of it, exactly one end frame goes out."""
        order = command.order
        params = order.params
        answer = Answer(
            order.id, self._worker, Detokenizer(self._tokenizer), StopStrings(params.stop),
            min_tokens=params.min_tokens, logprobs=params.logprobs is not None,
        )  # fmt: skip
        ending = Ending(params, self._tokenizer.eos_ids)
        active = Active(command, answer, ending, Clock(command.received_s))
        try:
            if command.cancelled:
                raise Cancelled("stopped before it began", node=self._worker.node_id)
            if self._worker.broken is not None:
                raise self._worker.broken
            active.prompt = self._prompt_ids(order)
            if order.hand is not None:
                self.handing.add(active)
            elif (reason := self._replay(active)) is not None:
                self.end(active, reason)
                return
            now, idle = time.monotonic(), not self.busy
            active.sequence = self._scheduler.add(self._request(active), now)
            self.ledger.taken(now, idle=idle)
            self._active[active.sequence.number] = active
            if active.answer.tokens >= active.sequence.limit:  # there was room for more where they were made
                self.give_up(active, "length")
        except Cancelled:
            self.end(active, "cancelled")
        except Exception as caught:  # noqa: BLE001  # whatever it was, it is the end of this answer
            if isinstance(caught, Busy):
                self.ledger.counts.refused += 1
            elif not isinstance(caught, MlxcelError):
                log.info("request %s failed: %s", order.id, trail(caught))
            self.end(active, "error", errors.wrap(caught, self._worker.node_id))

    def cancel(self, request: str) -> None:
        """End a request where it is; its caches go with the next plan."""
        for active in list(self._active.values()):
            if active.command.order.id == request:
                self.give_up(active, "cancelled")
        self.ledger.publish()

    def fail(self, error: MlxcelError) -> None:
        """No request can go on: a member is gone."""
        for active in list(self._active.values()):
            self.give_up(active, "cancelled" if active.command.cancelled else "error", error)
        self._scheduler.reset()
        self._forget_epoch(error)
        self.ledger.publish()

    def take(self, command: Brought | Landed | Sent) -> None:
        """What other instances, or members, have to say of sequences that go from one to another."""
        if isinstance(command, Landed):
            self.bringing.landed(command, self._epoch)
        elif isinstance(command, Sent):
            self.handing.sent(command)
        else:
            self.bringing.brought(command)
        self.ledger.publish()

    def active(self, sequence: int) -> Active | None:
        """The request with this sequence, if it has not ended."""
        return self._active.get(sequence)

    def _request(self, active: Active) -> Request:
        order = active.command.order
        return Request(
            owner=f"{active.command.owner} {order.caller or ''}",
            prompt=tuple(active.prompt),
            max_tokens=order.params.max_tokens,
            params=order.params.seeded().to_dict(),
            made=tuple(order.made or ()),
            recent=order.params.repetition_context if order.params.repetition_penalty != 1 else 0,
            exclusive=order.forced is not None,
            home=order.rank,
            remote=order.hand is None and self.bringing.wanted(active),
            hand=order.hand,
        )

    def _replay(self, active: Active) -> str | None:
        """Go through what has been made elsewhere; the reason when nothing is to follow."""
        order = active.command.order
        for token in order.made or ():
            if active.answer.replay(token):
                return "stop"
        return "length" if active.answer.tokens >= order.params.max_tokens else None

    def _prompt_ids(self, order: GenerateOrder) -> list[int]:
        """The prompt's ids; they and what is asked for are checked before any rank is told of the request."""
        if order.messages is not None:
            ids = self._tokenizer.chat_prompt(order.messages, context=self._context)
        elif order.prompt is not None:
            ids = self._tokenizer.encode(order.prompt, context=self._context)
        else:
            assert order.token_ids is not None
            ids = order.token_ids
        if not ids:
            raise errors.PromptError("the prompt is empty", advice="Give it at least one token.")
        if order.rank is not None and not 0 <= order.rank < (ranks := self._instance.layout.ep):
            what = f"rank {order.rank} is asked for, and the model has {ranks} with sequences of their own"
            raise RequestError(what, advice="Leave the rank out, or load the model with --ep.")
        rows = self._instance.part.vocab_size
        order.params.check_vocabulary(rows)
        check_constraint(order.params)
        if order.forced is not None:
            check_room(len(order.forced), rows)
        if (highest := max(*ids, *(order.forced or ids), *(order.made or ids))) >= rows:
            # MLX would read, or write, past the end of the embedding.
            raise errors.PromptError(f"token id {highest} is outside the model's vocabulary of {rows}")
        if self._context and len(ids) > self._context:
            raise errors.PromptTooLong(
                f"the prompt has {len(ids)} tokens, the model's context is {self._context}", advice="Shorten it."
            )
        return ids

    # -- steps ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """One thing: begin a step if there is one to begin, else take the result of the oldest under way."""
        if self._worker.broken is not None:
            self.fail(self._worker.broken)
            return
        now = time.monotonic()
        for sequence in self._scheduler.expire(now):
            self.end(self._active[sequence.number], "cancelled")
        self.bringing.look(now)
        self.handing.look(now)
        plan = self._scheduler.next(now)
        self._resting = plan is None and not self._flights
        stuck = self._resting and self.busy and not self.bringing
        try:
            if plan is not None:
                self._begin(plan)
            if self._flights and (plan is None or self._instance.layout.pp == 1):
                self._finish(self._flights[0])
        except Exception as error:  # noqa: BLE001  # whatever it was, it is the end of this epoch
            self._failed(error)
        self.kept.settle(now, plan, self._epoch, stuck=stuck)
        if not self.busy:
            self._worker.leave()
        self.ledger.publish(now if self.busy else None)

    def _begin(self, plan: StepPlan) -> None:
        """Tell everybody, and run our part."""
        instance, fabric, worker = self._instance, self._instance.fabric, self._worker
        layout = instance.layout
        if self._execution is None:
            self._epoch += 1
            self._execution = Execution(instance, self._epoch, worker.check)
        began = time.monotonic()
        recording = self._news(plan, began)
        worker.enter(self._epoch, alone=self._alone())
        worker.activity = doing(plan)
        self._flights.append(flight := Flight(plan, {}, began))
        telling = time.monotonic()
        try:
            for member, link in fabric.followers.items():
                told = plan.to_dict(with_tokens=layout.stage_of(member) == 0)
                fabric.tell(link, {"type": "step", "epoch": self._epoch, "record": recording, "plan": told})
        except MlxcelError as error:  # some were told
            fabric.begin_step(self._epoch, plan.step)
            instance.collectives.decline(error)
            raise
        if fabric.followers:
            self._spans.add(Kind.SEND_PLAN, telling, time.monotonic(), self._epoch, plan.step)
        self.bringing.begin(plan, self._epoch)
        outcome = self._execution.run(plan, worker.record(recording) if recording else None)
        if self._execution.recording is None:
            worker.finish_recording()
        worker.moved()
        flight.outcome.update(outcome)

    def _finish(self, flight: Flight) -> None:
        """Take what the oldest step sampled, from wherever that was."""
        plan, instance = flight.plan, self._instance
        outcome = dict(flight.outcome)
        for work in plan.work:
            sampler = instance.layout.sampler_at(work.home)
            if sampler != 0:
                began = time.monotonic()
                outcome |= heard(instance.fabric.recv_tokens(sampler, self._epoch, plan.step))
                self._spans.add(Kind.WAIT_TOKENS, began, time.monotonic(), self._epoch, plan.step, len(work.sampled))
        due = {row for work in plan.work for row in work.sampled}
        if outcome.keys() != due:
            raise WireError(f"step {plan.step} was to sample for {sorted(due)}, and did for {sorted(outcome)}")
        self._flights.popleft()
        self._worker.moved()
        now = time.monotonic()
        seconds, self._result = now - max(flight.began, self._result), now
        self.ledger.done(plan, len(due & self._active.keys()), now, self._epoch)
        for row, each in outcome.items():
            if isinstance(each, MlxcelError) and row in self._active:
                self.give_up(self._active[row], "error", each)
        drawn = {row: self._token(row, each) for row, each in outcome.items() if isinstance(each, Sampled)}
        self._scheduler.took(plan.step, {row: each.token for row, each in drawn.items()}, seconds)
        for row, each in drawn.items():
            if (active := self._active.get(row)) is not None:  # none, if it was cancelled meanwhile
                self.say(active, each, now)

    def _token(self, row: int, sampled: Sampled) -> Sampled:
        """What was sampled, or what a request that is fed its tokens is fed in its place."""
        active = self._active.get(row)
        forced = active.command.order.forced if active is not None else None
        return sampled if forced is None or active is None else sampled._replace(token=forced[active.answer.tokens])

    def say(self, active: Active, sampled: Sampled, now: float) -> None:
        """Send what a token makes of the text, and the end when it is the last."""
        assert active.sequence is not None
        if active.command.order.hand is not None:
            self._scheduler.finish(active.sequence)
            self.handing.first(active, sampled)
        elif (reason := self._said(active, sampled, now)) is not None:
            self._scheduler.finish(active.sequence)
            self.end(active, reason)

    def _said(self, active: Active, sampled: Sampled, now: float) -> str | None:
        """Send what a token makes of the text; the reason when it is the last."""
        answer = active.answer
        active.clock.token(now)
        if active.ending.ends(sampled.token):
            answer.tokens += 1
            return "stop"
        if answer.add(sampled):
            return "stop"
        assert active.sequence is not None
        return "length" if answer.tokens >= active.sequence.limit else None

    def _news(self, plan: StepPlan, now: float) -> str:
        """Tell who waits how far a prompt is; the request to note, if this step is of one."""
        recording = ""
        for row in (row for work in plan.work for row in work.sequences):
            if (active := self._active.get(row)) is None:
                continue
            self.begun(active, now, plan.step)
            if active.command.order.forced is not None and not active.noted:
                active.noted, recording = True, active.command.order.id
        for chunk in (chunk for work in plan.work for chunk in work.chunks):
            if (active := self._active.get(chunk.sequence)) is not None:
                assert active.sequence is not None
                if done := active.sequence.cached - chunk.count:
                    # One that is read again has made tokens, which are read with its prompt.
                    total = len(active.sequence.tokens)
                    news = {"type": "prefill", "id": active.command.order.id, "done": done, "total": total}
                    self._worker.outbox.stream(news)
        return recording

    def begun(self, active: Active, now: float, step: int) -> None:
        """Something is done for a request; the first time it has been in the queue till then."""
        if active.clock.started is None:
            assert active.sequence is not None
            active.clock.started = now
            self.ledger.started(active.sequence, active.clock.received, now, self._epoch, step)

    def _alone(self) -> str:
        """The request that a broken step would end, where it is the only one."""
        return next(iter(self._active.values())).command.order.id if len(self._active) == 1 else ""

    # -- the end of a request ---------------------------------------------------------------------

    def give_up(self, active: Active, reason: str, error: MlxcelError | None = None) -> None:
        """End a request before its time."""
        if active.sequence is not None:
            self._scheduler.cancel(active.sequence)
        self.end(active, reason, error)

    def end(self, active: Active, reason: str, error: MlxcelError | None = None, **more: Any) -> None:
        """The one last frame of a request."""
        order = active.command.order
        if active.sequence is not None:
            del self._active[active.sequence.number]
            self.bringing.drop(active.sequence)
            self.handing.over(active)
            self.kept.ended(order.id, active.command.owner, active.sequence)
        active.answer.end(
            reason,
            error=error if reason == "error" else None,
            usage={
                "prompt_tokens": len(active.prompt),
                "cached_tokens": min(active.reused, len(active.prompt)),
                "generation_tokens": active.answer.tokens,
            },
            timings=active.clock.timings(len(active.prompt), active.answer.tokens - len(order.made or ())),
            layout=self._instance.layout.name,
            **facts(active.fetch, active.clock.second_token),
            **more,
        )

    # -- when a step fails ------------------------------------------------------------------------

    def _failed(self, caught: Exception) -> None:
        """The step is lost, and all caches with it: who was in it alone ends, and the others are read again."""
        error = errors.wrap(caught, self._worker.node_id)
        if not isinstance(caught, MlxcelError):
            log.info("epoch %d failed: %s", self._epoch, trail(caught))
        if not isinstance(error, Cancelled):
            self.ledger.counts.failed_steps += 1
        if isinstance(error, PeerLost):
            self._worker.fail(self._instance.order.instance, error)
        within = [row for flight in self._flights for work in flight.plan.work for row in work.sequences]
        sharing = [self._active[row] for row in dict.fromkeys(within) if row in self._active]
        hopeless = isinstance(error, PeerLost | StepTimeout) or len({*within}) == 1  # one that left may be at fault
        for active in list(self._active.values()):
            if active.command.cancelled:
                self.give_up(active, "cancelled")
            elif hopeless and active in sharing and not isinstance(error, Cancelled):
                self.give_up(active, "error", error)
        left = [active.sequence for active in sharing if active in self._active.values()]
        self._scheduler.reset(suspects=[each for each in left if each is not None])
        self._forget_epoch(error)

    def _forget_epoch(self, error: MlxcelError) -> None:
        """Leave the epoch, and have everybody leave it.

        An abort goes both ways: the control link breaks a blocked wait, the hot link keeps order. Followers learn
        what kind of error it was and whose, not its words, which may quote a prompt.
        """
        self._flights.clear()
        self.kept.forget()
        self.bringing.leave()
        if self._instance.handoff is not None:
            self._instance.handoff.leave(self._epoch)
        self._worker.leave()
        self._worker.finish_recording()
        if self._execution is None:
            return
        self._execution = None
        details = {"code": error.code, "node": error.node, "cause": "the leader ended the step"}
        message = {"type": "abort", "epoch": self._epoch, "step": -1, "error": details}
        self._worker.outbox.to_members(message)
        for link in self._instance.fabric.followers.values():
            try:
                self._instance.fabric.tell(link, message, patience_s=LAST_WORD_S)
            except MlxcelError as lost:
                log.info("not told of the end: %s", lost)
                self._worker.fail(self._instance.order.instance, PeerLost(lost.cause, node=link.node))

"""The leader's side of a request: it tokenises, decides every step, and ends the stream exactly once.

Runs on the MLX thread of member 0. What it tells the router goes through the worker's outbox.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlxcel_nb import errors
from mlxcel_nb.errors import Cancelled, MlxcelError, PeerLost, RequestError
from mlxcel_nb.models.constraints import check as check_constraint
from mlxcel_nb.models.ending import Ending
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.sampling import Sampled
from mlxcel_nb.models.text import Detokenizer, StopStrings
from mlxcel_nb.runtime.answers import Answer, Clock
from mlxcel_nb.runtime.execution import Execution, Instance
from mlxcel_nb.runtime.protocol import GenerateOrder, Step
from mlxcel_nb.runtime.recording import check_room
from mlxcel_nb.util.log import get_logger, trail

if TYPE_CHECKING:
    from mlxcel_nb.runtime.worker import Generate, Worker

log = get_logger("runtime.leader")

LAST_WORD_S = 10.0
"""For a follower to take the end of an epoch; one that does not is given up: a stopped one is dead by then anyway."""

PREFILL_CHUNK = 256
"""Tokens a prefill step takes: large enough for the BLAS, small enough to hand to the next stage early."""


class Leader:
    """Runs requests on a loaded instance, one at a time."""

    def __init__(self, worker: Worker, instance: Instance) -> None:
        self._worker = worker
        self._instance = instance
        self._tokenizer = instance.tokenizer
        self._context = model_info(instance.order.model).context
        self._last_epoch = 0
        self._begun = False
        self._home = 0
        self._execution: Execution | None = None

    def generate(self, command: Generate) -> None:
        """Run one request to its end. Whatever happens, exactly one end frame goes out."""
        order = command.order
        self._last_epoch += 1
        stops, least = StopStrings(order.params.stop), order.params.min_tokens
        answer = Answer(order.id, self._worker, Detokenizer(self._tokenizer), stops, least)
        clock = Clock(command.received_s)
        prompt: list[int] = []
        self._begun = False
        command.epoch = self._last_epoch
        self._worker.enter(self._last_epoch)
        error: MlxcelError | None = None
        try:
            if command.cancelled:
                raise Cancelled("stopped before it began", node=self._worker.node_id)
            if self._worker.broken is not None:
                raise self._worker.broken
            prompt = self._prompt_ids(order)
            reason = self._run(order, prompt, answer, clock)
        except Cancelled:
            reason = "cancelled"
        except Exception as caught:  # noqa: BLE001  # whatever it was, it is the end of this answer
            if not isinstance(caught, MlxcelError):
                log.info("epoch %d failed: %s", self._last_epoch, trail(caught))
            error = errors.wrap(caught, self._worker.node_id)
            reason = "cancelled" if command.cancelled else "error"
            if isinstance(error, PeerLost):
                self._worker.fail(self._instance.order.instance, error)
        finally:
            self._execution = None
            self._worker.finish_recording()
            self._worker.leave()
        answer.end(
            reason,
            error=error if reason == "error" else None,
            usage={"prompt_tokens": len(prompt), "generation_tokens": answer.tokens},
            timings=clock.timings(len(prompt), answer.tokens),
            layout=self._instance.layout.name,
        )
        if self._begun:
            self._release_followers(None if reason in ("stop", "length") else error or Cancelled("stopped"))

    def _prompt_ids(self, order: GenerateOrder) -> list[int]:
        """The prompt's ids; they and what is asked for are checked before any rank is told of the request."""
        if order.messages is not None:
            ids = self._tokenizer.chat_prompt(order.messages)
        elif order.prompt is not None:
            ids = self._tokenizer.encode(order.prompt)
        else:
            assert order.token_ids is not None
            ids = order.token_ids
        if not ids:
            raise RequestError("the prompt is empty", advice="Give it at least one token.")
        if order.rank is not None and not 0 <= order.rank < (ranks := self._instance.layout.ep):
            what = f"rank {order.rank} is asked for, and the model has {ranks} with sequences of their own"
            raise RequestError(what, advice="Leave the rank out, or load the model with --ep.")
        rows = self._instance.part.vocab_size
        order.params.check_vocabulary(rows)
        check_constraint(order.params)
        if order.forced is not None:
            check_room(len(order.forced), rows)
        if (highest := max(*ids, *(order.forced or ids))) >= rows:
            # MLX would read, or write, past the end of the embedding.
            raise RequestError(f"token id {highest} is outside the model's vocabulary of {rows}")
        if self._context and len(ids) > self._context:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, the model's context is {self._context}", advice="Shorten it."
            )
        return ids

    def _run(self, order: GenerateOrder, prompt: list[int], answer: Answer, clock: Clock) -> str:
        """Prefill, then decode; the finish reason."""
        params = order.params
        room = self._context - len(prompt) + 1 if self._context else params.max_tokens
        limit = min(params.max_tokens, room)
        if limit == 0:
            return "length"
        ending = Ending(params, self._tokenizer.eos_ids)
        sampled = self._prefill(order, prompt)
        clock.first_token = time.monotonic()
        step = -(-len(prompt) // PREFILL_CHUNK)
        while True:
            token = sampled.token if order.forced is None else order.forced[answer.tokens]
            if ending.ends(token):
                answer.tokens += 1
                return "stop"
            if answer.add(token):
                return "stop"
            if answer.tokens >= limit:
                return "length"
            sampled = self._step(
                Step(epoch=self._last_epoch, step=step, count=1, sample=True, prefill=False, tokens=(token,))
            )
            step += 1

    def _prefill(self, order: GenerateOrder, prompt: list[int]) -> Sampled:
        epoch, params = self._last_epoch, order.params
        context = params.context_of(prompt, [])
        self._begun = True
        self._home = home = self._home_of(order)
        begin = {"type": "begin", "epoch": epoch, "params": params.to_dict(), "context": context, "home": home}
        recording = self._worker.record(order.id) if order.forced is not None else None
        if recording is not None:
            begin["record"] = order.id
        for link in self._instance.fabric.followers.values():
            self._instance.fabric.tell(link, begin)
        self._execution = Execution(self._instance, epoch, params, context, self._worker.check, recording, home)
        sampled = None
        for number, start in enumerate(range(0, len(prompt), PREFILL_CHUNK)):
            chunk = prompt[start : start + PREFILL_CHUNK]
            last = start + len(chunk) == len(prompt)
            if start:
                news = {"type": "prefill", "id": order.id, "done": start, "total": len(prompt)}
                self._worker.outbox.stream(news)
            self._worker.activity = f"prefill {start + len(chunk)}/{len(prompt)}"
            sampled = self._step(
                Step(epoch=epoch, step=number, count=len(chunk), sample=last, prefill=True, tokens=tuple(chunk))
            )
        assert sampled is not None
        self._worker.activity = "decode"
        return sampled

    def _home_of(self, order: GenerateOrder) -> int:
        """The expert-parallel rank that holds its keys and values: they take turns, unless one is asked for."""
        return self._last_epoch % self._instance.layout.ep if order.rank is None else order.rank

    def _step(self, step: Step) -> Any:
        """Tell everybody, run our part, and get the token if there is one to get."""
        instance, fabric = self._instance, self._instance.fabric
        layout = instance.layout
        try:
            for member, link in fabric.followers.items():
                reads = layout.stage_of(member) == 0 and layout.runs(member, self._home)
                fabric.tell(link, step.to_dict(with_tokens=reads))
        except MlxcelError as error:  # some were told
            fabric.begin_step(step.epoch, step.step)
            instance.collectives.decline(error)
            raise
        assert self._execution is not None
        sampled = self._execution.run(step)
        self._worker.progress += 1
        sampler = self._execution.sampler
        if sampler == 0 or not step.sample:
            return sampled
        message = fabric.recv_token(sampler, step.epoch, step.step)
        return Sampled(int(message["token"]), float(message["logprob"]))

    def _release_followers(self, error: MlxcelError | None) -> None:
        """The last word on an epoch, after its answer has gone out: `error` ends it early, None as planned.

        An abort goes both ways: the control link breaks a blocked wait, the hot link keeps order. Followers learn
        what kind of error it was and whose, not its words, which may quote a prompt.
        """
        message: dict[str, Any] = {"type": "end", "epoch": self._last_epoch}
        if error is not None:
            details = {"code": error.code, "node": error.node, "cause": "the leader ended the request"}
            message = {"type": "abort", "epoch": self._last_epoch, "step": -1, "error": details}
            self._worker.outbox.to_members(message)
        for link in self._instance.fabric.followers.values():
            try:
                self._instance.fabric.tell(link, message, patience_s=LAST_WORD_S)
            except MlxcelError as lost:
                log.info("not told of the end: %s", lost)
                self._worker.fail(self._instance.order.instance, PeerLost(lost.cause, node=link.node))

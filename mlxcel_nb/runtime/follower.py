"""A member that does not lead: it runs the steps that the leader sends, and leaves epochs. On the MLX thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlxcel_nb import errors
from mlxcel_nb.errors import PeerAborted, PeerLost, WireError
from mlxcel_nb.runtime.execution import Execution
from mlxcel_nb.runtime.instance import Instance
from mlxcel_nb.runtime.outcomes import doing, told
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.runtime.spans import Kind
from mlxcel_nb.scheduling.step_plan import StepPlan
from mlxcel_nb.util.log import get_logger, trail

if TYPE_CHECKING:
    from mlxcel_nb.runtime.worker import Worker

log = get_logger("runtime.follower")


class Follower:
    """One member's side of the steps that the leader has everybody run."""

    def __init__(self, worker: Worker, instance: Instance) -> None:
        self._worker = worker
        self._instance = instance
        self._execution: Execution | None = None
        self._left = 0  # the last epoch that is over for this member

    @property
    def execution(self) -> Execution | None:
        """The epoch under way, if one is."""
        return self._execution

    def obey(self, message: dict[str, Any], waited_since: float) -> None:
        """Do what one frame of the leader's asks for.

        Args:
            waited_since: when the wait for it began.

        Raises:
            WireError: it is no such frame.
        """
        kind = message.get("type")
        if kind == "step":
            came = time.monotonic()
            plan, epoch = StepPlan.from_dict(field(message, "plan", dict)), field(message, "epoch", int)
            self._instance.fabric.spans.add(Kind.WAIT_PLAN, waited_since, came, epoch, plan.step)
            self._step(epoch, plan, field(message, "record", str))
        elif kind == "abort":
            self._leave(field(message, "epoch", int))
        else:
            raise WireError(f"the leader sent {kind!r} on a hot link")

    def _leave(self, epoch: int) -> None:
        """What this member holds of `epoch` and those before it goes, and no step of theirs is run any more."""
        self._left = max(self._left, epoch)
        if self._execution is not None and self._execution.epoch <= self._left:
            if self._instance.handoff is not None:
                self._instance.handoff.leave(self._execution.epoch)
            self._execution = None
            self._worker.finish_recording()

    def _step(self, epoch: int, plan: StepPlan, recording: str) -> None:
        worker, fabric = self._worker, self._instance.fabric
        if epoch <= self._left:
            fabric.begin_step(epoch, plan.step)
            self._instance.collectives.decline(PeerAborted("left the step before", node=worker.node_id))
            return
        if self._execution is None or self._execution.epoch != epoch:
            self._execution = Execution(self._instance, epoch, worker.check)
        execution = self._execution
        worker.enter(epoch)
        worker.activity = doing(plan)
        try:
            outcome = execution.run(plan, worker.record(recording) if recording else None)
            if execution.answers(plan):
                began = time.monotonic()
                fabric.tell_leader(told(epoch, plan.step, outcome))
                fabric.spans.add(Kind.SEND_TOKENS, began, time.monotonic(), epoch, plan.step, len(outcome))
            if execution.recording is None:
                worker.finish_recording()
            worker.moved()
        except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
            self._leave(epoch)
            wrapped = errors.wrap(error, worker.node_id)
            if isinstance(wrapped, PeerLost):
                worker.broken = worker.broken or wrapped
            if not isinstance(wrapped, PeerAborted | errors.Cancelled):
                log.info("step %d.%d failed on %s: %s", epoch, plan.step, worker.node_id, trail(error))
                worker.outbox.to_leader({"type": "failed", "epoch": epoch, "error": wrapped.to_dict()})
        finally:
            worker.leave()

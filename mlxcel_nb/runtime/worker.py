"""The MLX thread: it alone touches arrays, models and hot links.

Other threads hand it commands with `post`, break what it is doing with `abort` and `fail`, and read `activity`.
It tells them things only through the callables of `Outbox`, which hop to the node's loop.

A follower waits on its hot link to the leader, everybody else on the command queue; a leader with requests looks at
the queue between two steps. `_state` guards the short moments in which the thread goes from one to the other, so that
an abort meant for a finished epoch never hits the next one.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError, StepTimeout
from mlxcel_nb.net.hot.hot_link import Interrupt
from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.runtime.commands import (
    Brought,
    Cancel,
    Command,
    Generate,
    Join,
    Kv,
    Landed,
    Load,
    Open,
    Outbox,
    Sent,
    Stop,
    Unload,
)
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.protocol import OpenOrder, failed_end
from mlxcel_nb.runtime.spans import Spans
from mlxcel_nb.runtime.stuck import GRACE_S, Inside
from mlxcel_nb.scheduling.step_plan import Hand
from mlxcel_nb.util.log import get_logger, trail

if TYPE_CHECKING:  # these bring MLX, which a node without a model does without
    from mlxcel_nb.runtime.engine import Engine
    from mlxcel_nb.runtime.follower import Follower
    from mlxcel_nb.runtime.instance import Instance
    from mlxcel_nb.runtime.recording import Recording

log = get_logger("runtime.worker")

IDLE_WAIT_S = 5.0

LOADING = -1
"""The epoch of a load; requests count from 1, and 0 is none."""


class _Wake(Exception):
    """Breaks a follower's idle wait: there is a command."""


class Worker:
    """One MLX thread of one node.

    Args:
        threads: cores this node may use for MLX.

    Attributes:
        progress: grows with each step and each layer of a prompt, and while a part is loaded.
        moved_s: when it last did, or work began, by the monotonic clock.
    """

    def __init__(self, node_id: str, outbox: Outbox, *, threads: int) -> None:
        self.node_id = node_id
        self.outbox = outbox
        self.threads = threads
        self.activity = "idle"
        self.progress = 0
        self.moved_s = time.monotonic()
        self.spans = Spans()
        self.instance: Instance | None = None
        self.engine: Engine | None = None
        self.follower: Follower | None = None
        self.recording: Recording | None = None
        self.broken: MlxcelError | None = None
        self.ended: MlxcelError | None = None
        self.interrupt = Interrupt()
        self.inside = Inside()
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._state = threading.Lock()
        self._waiting = False
        self._epoch = 0
        self._aborted: tuple[int, MlxcelError] | None = None
        self._lost: tuple[str, MlxcelError] | None = None
        self._troubled_s = 0.0
        self._alone = ""
        self._thread = threading.Thread(target=self._main, name="mlx", daemon=True)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        self._queue.put(command)
        with self._state:
            if self._waiting:
                self.interrupt.set(_Wake())

    def abort(self, epoch: int, error: MlxcelError) -> None:
        """Leave `epoch` and all before it, now or as soon as the thread gets there."""
        with self._state:
            if self._aborted is None or self._aborted[0] < epoch:
                self._aborted = (epoch, error)
            if 0 < self._epoch <= epoch:
                self.interrupt.set(error)
        if not isinstance(error, errors.Cancelled):
            self._trouble()

    def break_off(self, request: str) -> None:
        """Leave the step under way, if it is for the request with this id and no other."""
        with self._state:
            if self._epoch > 0 and self._alone == request:
                self.interrupt.set(errors.Cancelled("stopped by the user"))

    def abort_load(self, error: MlxcelError) -> None:
        """Leave the load under way; one that has not begun is cancelled by its own flag."""
        with self._state:
            if self._epoch == LOADING:
                self.interrupt.set(error)

    def fail(self, instance: str, error: MlxcelError) -> None:
        """A member of `instance` is gone: no further epoch can run on it."""
        with self._state:
            self._lost = (instance, error)
            self.broken = self.broken or error
            if self._epoch:
                self.interrupt.set(error)
            self.inside.lost.set(error)
        self._trouble()

    def _trouble(self) -> None:
        self._troubled_s = time.monotonic()
        self.outbox.trouble()

    @property
    def troubled(self) -> MlxcelError | None:
        """What `abort` or `fail` brought in for what the MLX thread is at."""
        with self._state:
            aborted = self._aborted
            if aborted is not None and 0 < self._epoch <= aborted[0] and not isinstance(aborted[1], errors.Cancelled):
                return self.broken or aborted[1]
            return self.broken

    @property
    def stuck(self) -> MlxcelError | None:
        """`troubled`, where the MLX thread is inside MLX and should have come out by now."""
        since = self.inside.since
        if since is None or time.monotonic() - max(since, self._troubled_s) < GRACE_S:
            return None
        return self.troubled

    # -- the MLX thread ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what `abort` or `fail` brought in; called wherever the thread is about to do much."""
        self.interrupt.check()
        self.moved()

    def moved(self) -> None:
        """Something is done."""
        self.progress += 1
        self.moved_s = time.monotonic()

    def enter(self, epoch: int, *, alone: str = "") -> None:
        """Begin a step of `epoch`; one that was aborted before it began is broken off at its first look.

        Args:
            alone: the request that the step is for, where no other is under way.
        """
        with self._state:
            self._epoch, self._alone = epoch, alone
            self.moved_s = time.monotonic()
            self._forget_frames()
            self.interrupt.clear()
            if self._aborted is not None and 0 < epoch <= self._aborted[0]:
                self.interrupt.set(self._aborted[1])

    def _forget_frames(self) -> None:
        """An error that is kept, and was raised, holds all that the frames it went through hold: caches, and models."""
        kept = [self.broken, *(pair[1] for pair in (self._aborted, self._lost) if pair is not None)]
        for error in filter(None, kept):
            error.__traceback__ = error.__context__ = error.__cause__ = None

    def _enter_load(self, instance: str) -> None:
        """Begin to load: epochs count from 1 again, and only the loss of a member of this instance counts."""
        with self._state:
            self._epoch = LOADING
            self._aborted = None
            self.broken = self._lost[1] if self._lost is not None and self._lost[0] == instance else None
            self.interrupt.clear()
            self.inside.lost.clear()
            if self.broken is not None:
                self.interrupt.set(self.broken)
                self.inside.lost.set(self.broken)

    def leave(self) -> None:
        self.enter(0)
        self.activity = "idle"

    def _main(self) -> None:
        try:
            while self._turn():
                if self.instance is not None:
                    self.instance.tidy()
        except BaseException as error:  # noqa: BLE001  # whatever it was, it is told to all who wait
            log.error("the MLX thread ended: %s", trail(error))
            self.ended = errors.wrap(error, self.node_id)
            self.outbox.died(self.ended.to_dict())
        finally:
            self._drop()
            self.interrupt.close()
            self.inside.lost.close()

    def _turn(self) -> bool:
        """Take one command or one frame of the leader's. False when told to stop."""
        instance = self.instance
        if instance is None or instance.me == 0 or self.broken is not None:
            busy = self.engine is not None and self.engine.busy
            patience = self.engine.patience_s if busy and self.engine is not None else IDLE_WAIT_S
            try:
                return self._obey(self._queue.get(timeout=patience) if patience else self._queue.get_nowait())
            except queue.Empty:
                pass
            if busy and self.engine is not None:
                self.engine.advance()
            return True
        with self._state:
            self._waiting = self._queue.empty()
        try:
            if self._waiting:
                self._follow(instance)
        except (_Wake, StepTimeout):
            pass
        except MlxcelError as error:
            log.info("%s stops following: %s", self.node_id, error)
            self.broken = self.broken or errors.wrap(error, self.node_id)
            # The leader notices at once, rather than when it misses what this member owes it.
            instance.fabric.close(f"it stopped following: {self.broken.code}")
        finally:
            with self._state:
                self._waiting = False
                self.interrupt.clear()
        try:
            return self._obey(self._queue.get_nowait())
        except queue.Empty:
            return True

    def _obey(self, command: Command) -> bool:
        if self.engine is not None:
            self.engine.stir()
        match command:
            case Stop():
                return False
            case Load():
                self._load(command)
            case Unload():
                self._drop()
                command.done()
            case Open():
                self._open(command.order)
            case Generate():
                self._generate(command)
            case Kv():
                from mlxcel_nb.runtime import kv_store

                kv_store.obey(self, command)
            case Join():
                self._join(command)
            case Brought() | Landed() | Sent():
                if self.engine is not None:
                    self.engine.take(command)
            case Cancel():
                if self.engine is not None:
                    self.engine.cancel(command.request)
        return True

    def _load(self, command: Load) -> None:
        from mlxcel_nb.models.loading import give_back
        from mlxcel_nb.runtime import loading

        order = command.order
        self._enter_load(order.instance)
        try:
            if command.cancelled:
                raise errors.Cancelled("the load was given up", node=self.node_id)
            self.check()
            self.instance = loading.load(self, order, command.me, command.links)
            if command.me:
                from mlxcel_nb.runtime.follower import Follower

                self.follower = Follower(self, self.instance)
            give_back()  # what reading the tokenizer and the files left behind
            part, room = self.instance.part, loading.room_left(order, self.instance.part)
            self.instance.room = Room.from_dict(room)
            self.outbox.to_router({
                "type": "loaded", "id": order.id, "node": self.node_id, "layers": list(part.layers),
                "planned_bytes": part.planned_bytes, "resident_bytes": part.resident_bytes,
                "dtype": part.dtype, "warnings": list(part.warnings), "room": room,
                "vocab_parallel": part.part.vocab_parallel and part.part.tp_size > 1,
                "laps": part.laps,
            })  # fmt: skip
        except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
            log.info("load failed on %s: %s", self.node_id, trail(error))
            wrapped = errors.wrap(error, self.node_id)
            # Before the links go: the others will report their loss, which says less.
            self.outbox.to_router({"type": "error", "id": order.id, "error": wrapped.to_dict()})
            for link in command.links.values():
                link.close()
            self._drop()
            command.failed()
        finally:
            self.leave()

    def _open(self, order: OpenOrder) -> None:
        """Become the coordinator of what is loaded here."""
        from mlxcel_nb.runtime.engine import Engine

        try:
            if self.instance is None or self.instance.order.instance != order.instance:
                raise errors.ClusterError("no such model is loaded", advice="Load one first.")
            self.engine = Engine(self, self.instance, order)
        except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
            wrapped = errors.wrap(error, self.node_id)
            self.outbox.to_router({"type": "error", "id": order.id, "error": wrapped.to_dict()})
        else:
            self.outbox.to_router({"type": "reply", "id": order.id})

    def _join(self, command: Join) -> None:
        """Work together with other instances from now on."""
        from mlxcel_nb.runtime.handoff.handoff import Handoff

        instance = self.instance
        try:
            if instance is None or instance.order.instance != command.order.instance:
                raise errors.ClusterError("no such model is loaded", advice="Load one first.")
            if instance.handoff is not None:
                instance.handoff.close()
            instance.handoff = Handoff(
                instance, command, landed=self._landed, over=self._sent, broken=self.outbox.broken
            )
        except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
            for link in (*command.outgoing.values(), *command.incoming.values()):
                link.close()
            command.failed(errors.wrap(error, self.node_id))

    def _landed(self, epoch: int, transfer: int) -> None:
        """Have the leader know that all of a transfer is here; on the thread of a link."""
        if self.engine is not None:
            self.post(Landed(self.node_id, epoch, transfer))
        else:
            self.outbox.to_leader({"type": "landed", "epoch": epoch, "transfer": transfer})

    def _sent(self, hand: Hand, how: Account | MlxcelError) -> None:
        """Have the leader know what has become of what was to be sent; on the thread of a link, or the MLX thread."""
        error = how if isinstance(how, MlxcelError) else None
        account = how if isinstance(how, Account) else None
        if self.engine is not None:
            self.post(Sent(self.node_id, hand.to, hand.transfer, account, error))
        else:
            self.outbox.to_leader({
                "type": "sent", "to": hand.to, "transfer": hand.transfer,
                "account": account and account.to_list(), "error": error and error.to_dict(),
            })  # fmt: skip

    def _generate(self, command: Generate) -> None:
        held = self.instance.order.instance if self.instance is not None else ""
        if self.engine is None or held != command.order.instance:
            error = errors.ClusterError("no such model is loaded", node=self.node_id, advice="Load one first.")
            self.outbox.stream(failed_end(command.order.id, error.to_dict()))
            return
        self.engine.add(command)

    def _drop(self) -> None:
        """Forget the model and close its links."""
        if self.engine is not None:
            self.engine.fail(errors.ClusterError("the model was unloaded", node=self.node_id))
            self.engine = None
        self.follower = None
        self.recording = None
        if self.instance is not None:
            if self.instance.handoff is not None:
                self.instance.handoff.close()
            self.instance.fabric.close()
            self.instance = None
            from mlxcel_nb.models.loading import give_back

            give_back()
        self.broken = None

    def record(self, request: str) -> Recording:
        """Begin to note what `request` gives here, in place of what was noted before."""
        from mlxcel_nb.runtime.recording import Recording

        self.recording = Recording(request)
        return self.recording

    def finish_recording(self) -> None:
        """The request under way is over; if it was noted, that can be asked for now."""
        if self.recording is not None and not self.recording.done:
            self.recording.finish()

    # -- following --------------------------------------------------------------------------------

    def _follow(self, instance: Instance) -> None:
        """Wait for the leader's next frame and do what it says."""
        link = instance.fabric.leader
        assert link is not None  # followers have one
        began = time.monotonic()
        message = link.recv_control(
            deadline=began + IDLE_WAIT_S, interrupt=self.interrupt, what="the leader's next step"
        )
        with self._state:
            self._waiting = False
        assert self.follower is not None
        self.follower.obey(message, began)

"""What a user holds: a cluster of engines, and the model split over them.

Every method is synchronous, may be called from any thread, a cell, or a running loop's thread, and has a twin with
a leading `a` for `await`. An interrupt of a waiting call undoes what it began.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mlxcel_nb.client import losses, plans, status
from mlxcel_nb.client import model as loaded
from mlxcel_nb.client.asked import Asked
from mlxcel_nb.client.exits import Exits
from mlxcel_nb.client.model import Model
from mlxcel_nb.client.report import ClusterStatus, Completion, LoadProgress, LoadReport
from mlxcel_nb.client.router import Router, closed_error
from mlxcel_nb.client.transfers import check_transfer
from mlxcel_nb.cluster.collectives import OWN, check_collectives
from mlxcel_nb.cluster.names import check_given_name
from mlxcel_nb.cluster.roles import AUTO, PREFILL_FROM
from mlxcel_nb.cluster.secret import Secret, random_secret
from mlxcel_nb.cluster.shape import parse_links
from mlxcel_nb.errors import ClusterError
from mlxcel_nb.launch.environment import threads_for
from mlxcel_nb.launch.local import EngineInfo, LocalCluster
from mlxcel_nb.scheduling.replicas import PREFIX_AWARE, check_policy
from mlxcel_nb.util import times
from mlxcel_nb.util.versions import local_versions

START_S = 60.0


class Cluster(Asked):
    """Engines on this machine, attached through ipyparallel, with an encrypted data plane between them.

    Args:
        n: number of engines.
        name: shown in status and bound into the handshake; a random one when None.
        secret: the cluster secret; a random one of 32 bytes when None.
        deadline: seconds the start may take.
        threads: cores for each engine; the cores this process may use, shared out, when None.
        step_s: a step of generation that makes no progress for this long fails.
        link: what links are made to be like: "5ms,1Gbit" for all, the notebook's too, and "0-3:40ms" for that of two
            engines; one or several.

    Use it as a context manager, or call `start` and `stop`.
    """

    def __init__(
        self,
        n: int = 2,
        *,
        name: str | None = None,
        secret: Secret | None = None,
        deadline: float = START_S,
        threads: int | None = None,
        step_s: float = times.STEP_S,
        link: str | Sequence[str] = (),
    ) -> None:
        plans.check_count(n)
        self.n = n
        self.link = (link,) if isinstance(link, str) else tuple(link)
        self._links = parse_links(self.link, [f"engine-{number}" for number in range(n)])
        self.name = check_given_name("cluster name", name) if name is not None else f"mlxcel-{secrets.token_hex(3)}"
        self.deadline = deadline
        self.threads = threads or threads_for(n)
        self.step_s = step_s
        self.nodes: list[EngineInfo] = []
        self._secret = secret or random_secret()
        self.secret_is_random = secret is None
        """Whether nobody can know the secret but the processes of this cluster."""
        self._launcher: LocalCluster | None = None
        self._router: Router | None = None
        self._loaded: Model | None = None
        self._last: Completion | None = None
        self._exits = Exits()
        self._finalizer: weakref.finalize[..., Cluster] | None = None
        self._lock = threading.Lock()
        self._model_lock = threading.Lock()

    def __repr__(self) -> str:
        state = "running" if self.running else "not running"
        holds = f", {Path(model.model).name} as {model.layout}" if (model := self.model) else ""
        return f"<Cluster {self.name}: {self.n} engines, {state}{holds}>"

    # -- life -------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._router is not None

    @property
    def router_id(self) -> str:
        """This process's name on the data plane."""
        return self._running().node_id

    def start(self, on_progress: Callable[[str], None] | None = None) -> Self:
        """Start the engines and connect to each.

        Raises:
            ClusterError: already started, or an engine did not come up; nothing is left running.
        """
        with self._lock:
            if self.running:
                raise ClusterError(f"cluster {self.name} is already running", advice="Stop it first.")
            launcher = LocalCluster()
            router: Router | None = None
            self._exits = Exits()
            try:
                launcher.on_exit(self._exits.tell)
                self.nodes = launcher.start(
                    self.n,
                    name=self.name,
                    secret=self._secret,
                    threads_per_engine=self.threads,
                    links=self.link,
                    deadline_s=self.deadline,
                    progress=on_progress,
                )
                router = Router(self.name, self._secret, self._links)
                router.connect({node.node_id: node.address for node in self.nodes})
            except BaseException:
                if router is not None:
                    router.close()
                launcher.stop()
                self.nodes = []
                raise
            self._launcher, self._router = launcher, router
            self._finalizer = weakref.finalize(self, _end_later, router, launcher)
            self._finalizer.atexit = False  # the launcher has its own way to leave with the interpreter
            _running.add(self)
        return self

    def stop(self) -> None:
        """End every engine and forget the model. Stopping a stopped cluster does nothing."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
            router, self._router = self._router, None
            _running.discard(self)
            self._loaded = None
            if self._finalizer is not None:
                self._finalizer.detach()
            try:
                if router is not None:
                    router.close()
            finally:
                if launcher is not None:
                    launcher.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def secret(self) -> Secret:
        """The cluster secret, wrapped so that nothing shows it."""
        return self._secret

    @property
    def client(self) -> Any:
        """The ipyparallel `Client` of the control plane, for `%px` and friends."""
        if self._launcher is None:
            raise closed_error()
        return self._launcher.client

    def _running(self) -> Router:
        if self._router is None:
            raise closed_error()
        return self._router

    # -- models -----------------------------------------------------------------------------------

    def load(
        self,
        model: str,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        layers: str | None = None,
        dp: int = 1,
        prefill: int = 0,
        decode: int = 0,
        prefill_layout: str | None = None,
        decode_layout: str | None = None,
        kv_transfer: str = AUTO,
        prefill_from: int = PREFILL_FROM,
        route: str = PREFIX_AWARE,
        dtype: str = "auto",
        allow_code: bool = False,
        collectives: str = OWN,
        vocab_parallel: bool = False,
        micro_batches: int = 0,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> LoadReport:
        """Split `model` over the first `tp * pp` engines, or the first `ep`, times `dp`, and make one token with it.

        Args:
            model: an alias, a folder, a GGUF file or a hub id.
            tp: tensor ranks per stage.
            pp: pipeline stages.
            ep: expert-parallel ranks: each has some experts, and everything else for the requests that it holds.
            layers: manual stages, e.g. "0-3,4-29".
            dp: data parallel replicas: whole copies, each split so, on engines of its own. A request goes to the one
                that has least to do, or that has read the beginning of its prompt and is not much busier.
            prefill, decode: in place of replicas, groups of engines that read prompts, and groups that go on with what
                those have read: so reading takes no time from whoever is being answered.
            prefill_layout, decode_layout: how each of them is split, as "tp2" or by layers, as "0-9,10-29"; as `tp` and
                `pp` say where not given.
            kv_transfer: how keys and values travel from the ones to the others: "plain", "lz4", or rounded as "int8" or
                "int4"; "auto" measures and takes what is fastest of the first two.
            route: how one of several copies is chosen: "prefix-aware", "least-loaded", "memory-aware", "round-robin".
            prefill_from: prompts with fewer tokens to read are read where they are answered.
            dtype: "auto" computes in float32 on a CPU and as stored elsewhere; "native" as stored; or "float32",
                "float16", "bfloat16".
            allow_code: let a folder that is Python code of its own run it on the engines; else it is refused.
            collectives: who adds the partial sums of tensor ranks up: "own", encrypted, or MLX's "mlx-ring",
                "mlx-jaccl" or "mlx-nccl", which are not.
            vocab_parallel: tensor ranks share the embedding and the head too: less memory, and a little more to send.
            micro_batches: groups of requests that go through the stages in turn, so that all stages work; 0 for one a
                stage.

        Raises:
            ConfigError: a split that cannot work, before anything is read. ModelError: files. MlxcelError: a node.
        """
        with self._model_lock:
            router = self._running()
            if self._loaded is not None:
                raise losses.held(self._loaded.report, self.lost, self.n)
            check_collectives(collectives)
            plan = plans.prepare(
                model, tp=tp, pp=pp, ep=ep, layers=layers, dp=dp, prefill=prefill, decode=decode,
                prefill_layout=prefill_layout, decode_layout=decode_layout, micro_batches=micro_batches,
                allow_code=allow_code,
            )  # fmt: skip
            check_transfer(kv_transfer, prefill_from)
            check_policy(route)
            self._loaded = loaded.load(
                router, plan, self.nodes,
                explain=partial(losses.explain, router=router, engines=self.nodes, exits=self._exits),
                lost=partial(losses.lost, router, self.nodes, self._exits),
                on_progress=on_progress,
                step_s=self.step_s, dtype=dtype, allow_code=allow_code, collectives=collectives,
                vocab_parallel=vocab_parallel, transfer=kv_transfer, least=prefill_from,
                policy=route,
            )  # fmt: skip
            return self._loaded.report

    def unload(self) -> None:
        """Drop the model on every engine; requests under way are cancelled.

        Raises:
            ClusterError: no model is loaded.
        """
        with self._model_lock:
            model = self._held()
            try:
                model.drop()
            finally:
                self._last = model.last or self._last
                self._loaded = None

    @property
    def model(self) -> LoadReport | None:
        """The loaded model, if one is."""
        return self._loaded.report if self._loaded else None

    @property
    def problem(self) -> str:
        """Why no request can be answered now; "" where one can. Asks nobody, so it answers at once."""
        if not self.running:
            return "the cluster is not running"
        model = self._loaded
        return model.problem() if model else "no model is loaded"

    def _held(self) -> Model:
        self._running()
        if self._loaded is None:
            raise ClusterError("no model is loaded", advice="Load one first.")
        return self._loaded

    # -- status -----------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[str, str]:
        """Engines that count as lost, and why; none is taken back, even if its process runs on."""
        return losses.lost(self._router, self.nodes, self._exits) if self._router else {}

    def status(self) -> ClusterStatus:
        """Ask every node; a node that does not answer is shown as it was last seen."""
        router = self._router
        if router is None:
            return ClusterStatus(name=self.name, router_id="", state="stopped", nodes=(), links=(), model=None)
        exits, model = self._exits.known(), self._loaded
        nodes, links = status.gather(router, self.nodes, exits)
        links += status.group_links(nodes)
        differing = status.differing(
            {router.node_id: local_versions(), **{node.node_id: node.versions for node in nodes}}
        )
        return ClusterStatus(
            name=self.name,
            router_id=router.node_id,
            state="running",
            nodes=nodes,
            links=links,
            model=self.model,
            replicas=model.replicas.report({node.node_id: node.error for node in nodes}) if model else (),
            last=(self._loaded and self._loaded.last) or self._last,
            differing=differing,
            warnings=status.warnings(nodes, differing, exits),
        )


def _end_later(router: Router, launcher: LocalCluster) -> None:
    """End what a cluster nobody holds any more has left. On a thread of its own: this may be anybody's thread."""

    def end() -> None:
        router.close()
        launcher.stop()

    threading.Thread(target=end, name="mlxcel-end", daemon=True).start()


_running: weakref.WeakSet[Cluster] = weakref.WeakSet()


def running_clusters() -> list[Cluster]:
    """The clusters this process has started and not stopped, by name."""
    return sorted(_running, key=lambda cluster: cluster.name)

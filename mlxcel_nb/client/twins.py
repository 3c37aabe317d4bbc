"""The cluster's methods for `await`: each runs its synchronous twin on a thread, so a running loop is never blocked."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mlxcel_nb.client.report import BatchProgress, ClusterStatus, Completion, LoadProgress, LoadReport
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.models.params import SamplingParams

if TYPE_CHECKING:
    from mlxcel_nb.client.forcing import Forced
    from mlxcel_nb.client.saved_kv import KvReport

Prompt = str | Sequence[int] | None


class AsyncTwins(ABC):
    """What `Cluster` inherits; the abstract methods are its own."""

    @abstractmethod
    def start(self, on_progress: Callable[[str], None] | None = None) -> Self: ...

    @abstractmethod
    def stop(self) -> None: ...

    @abstractmethod
    def load(
        self,
        model: str,
        *,
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        layers: str | None = None,
        dp: int = 1,
        dtype: str = "auto",
        allow_code: bool = False,
        on_progress: Callable[[LoadProgress], None] | None = None,
    ) -> LoadReport: ...

    @abstractmethod
    def unload(self) -> None: ...

    @abstractmethod
    def status(self) -> ClusterStatus: ...

    @abstractmethod
    def stream(
        self,
        prompt: Prompt = None,
        params: SamplingParams | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
    ) -> Stream: ...

    @abstractmethod
    def forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Forced: ...

    @abstractmethod
    def save_kv(
        self,
        name: str,
        prompt: Prompt = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        conversation: Sequence[Mapping[str, str]] = (),
    ) -> KvReport: ...

    @abstractmethod
    def load_kv(self, name: str) -> KvReport: ...

    @abstractmethod
    def generate_all(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversations: Sequence[list[dict[str, Any]]] | None = None,
        n: int = 1,
        on_progress: Callable[[BatchProgress], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Completion]: ...

    async def astart(self, on_progress: Callable[[str], None] | None = None) -> Self:
        return await asyncio.to_thread(self.start, on_progress)

    async def astop(self) -> None:
        await asyncio.to_thread(self.stop)

    async def __aenter__(self) -> Self:
        await self.astart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.astop()

    async def aload(self, model: str, **options: Any) -> LoadReport:
        return await asyncio.to_thread(lambda: self.load(model, **options))

    async def aunload(self) -> None:
        await asyncio.to_thread(self.unload)

    async def astatus(self) -> ClusterStatus:
        return await asyncio.to_thread(self.status)

    async def aforced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Forced:
        return await asyncio.to_thread(self.forced, prompt, tokens)

    async def asave_kv(self, name: str, prompt: Prompt = None, **options: Any) -> KvReport:
        return await asyncio.to_thread(lambda: self.save_kv(name, prompt, **options))

    async def aload_kv(self, name: str) -> KvReport:
        return await asyncio.to_thread(self.load_kv, name)

    async def astream(
        self,
        prompt: Prompt = None,
        params: SamplingParams | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
    ) -> Stream:
        return await asyncio.to_thread(self.stream, prompt, params, messages=messages, rank=rank)

    async def agenerate(
        self,
        prompt: Prompt = None,
        params: SamplingParams | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
    ) -> Completion:
        """`generate` for `await`; cancelling the task cancels the request on every rank."""
        stream = await self.astream(prompt, params, messages=messages, rank=rank)
        try:
            async for _ in stream:
                pass
        except asyncio.CancelledError:
            stream.cancel()
            raise
        assert stream.completion is not None
        return stream.completion

    async def agenerate_all(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversations: Sequence[list[dict[str, Any]]] | None = None,
        n: int = 1,
        on_progress: Callable[[BatchProgress], None] | None = None,
    ) -> list[Completion]:
        """`generate_all` for `await`, on a thread; cancelling the task cancels all requests on every rank."""
        left = threading.Event()
        try:
            return await asyncio.to_thread(
                lambda: self.generate_all(
                    prompts, params, conversations=conversations, n=n, on_progress=on_progress, stopped=left.is_set
                )
            )
        finally:
            left.set()

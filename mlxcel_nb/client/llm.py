"""A model with a cluster of its own: the shortest way to text in Python."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from mlxcel_nb.client import arguments, bar
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.plans import prepare
from mlxcel_nb.client.report import Completion
from mlxcel_nb.cluster.collectives import OWN, check_collectives
from mlxcel_nb.models.params import SamplingParams

Conversation = list[dict[str, Any]]
Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A model split over engines that this object starts and stops.

    Args:
        model: an alias, a folder, a GGUF file or a hub id.
        tensor_parallel_size, pipeline_parallel_size: ranks and stages; one engine for each pair.
        expert_parallel_size: ranks with some experts each and the rest whole; in place of the other two.
        data_parallel_size: replicas, each on so many engines; requests are shared out among them.
        prefill, decode, prefill_layout, decode_layout: as for `Cluster.load`.
        allow_code: let a model folder's own Python code run on the engines.
        collectives: as for `Cluster.load`; all but "own" are unencrypted.
        vocab_parallel, micro_batches: as for `Cluster.load`.
        cluster: use this running cluster instead of starting one; it is not stopped then.
        options: passed on to `Cluster`.

    Example:
        >>> with LLM("smollm2-135m", pipeline_parallel_size=2) as llm:
        ...     print(llm.generate("Two plus two is")[0].text)
    """

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_parallel_size: int = 1,
        prefill: int = 0,
        decode: int = 0,
        prefill_layout: str | None = None,
        decode_layout: str | None = None,
        dtype: str = "auto",
        allow_code: bool = False,
        collectives: str = OWN,
        vocab_parallel: bool = False,
        micro_batches: int = 0,
        cluster: Cluster | None = None,
        **options: Any,
    ) -> None:
        self._owned = cluster is None
        split: dict[str, Any] = {
            "tp": tensor_parallel_size, "pp": pipeline_parallel_size, "ep": expert_parallel_size,
            "dp": data_parallel_size, "prefill": prefill, "decode": decode, "prefill_layout": prefill_layout,
            "decode_layout": decode_layout, "micro_batches": micro_batches, "allow_code": allow_code,
        }  # fmt: skip
        if cluster is None:  # what can be refused without engines is refused before they start
            check_collectives(collectives)
            cluster = Cluster(prepare(model, **split).engines, **options).start()
        self.cluster = cluster
        try:
            self.report = self.cluster.load(
                model, **split, dtype=dtype, collectives=collectives, vocab_parallel=vocab_parallel
            )
        except BaseException:
            if self._owned:
                self.cluster.stop()
            raise

    def __repr__(self) -> str:
        return f"<LLM {self.report.model} as {self.report.layout} on {self.cluster.name}>"

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = True,
    ) -> list[Completion]:
        """One completion per prompt, in their order; many run at once.

        Args:
            prompts: one or several, each text or token ids.
            params: for all, or one for each prompt.
            n: completions per prompt, side by side.
            progress: show a bar, where somebody can see it and there is more than one completion to wait for.

        Raises:
            RequestError: an argument that is none, before anything is sent.
            MlxcelError: the first request that failed, with the number of its prompt; the others are cancelled.
        """
        arguments.check_n(n)
        several = arguments.prompts_of(prompts)
        with bar.shown(n * len(several), wanted=progress) as tell:
            return self.cluster.generate_all(several, params, n=n, on_progress=tell)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = True,
    ) -> list[Completion]:
        """One answer per conversation, rendered with the model's chat template; else as `generate`."""
        arguments.check_n(n)
        several = arguments.conversations_of(messages)
        with bar.shown(n * len(several), wanted=progress) as tell:
            return self.cluster.generate_all(conversations=several, params=params, n=n, on_progress=tell)

    async def agenerate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = True,
    ) -> list[Completion]:
        """`generate` for `await`; cancelling the task cancels all requests under way."""
        arguments.check_n(n)
        several = arguments.prompts_of(prompts)
        with bar.shown(n * len(several), wanted=progress) as tell:
            return await self.cluster.agenerate_all(several, params, n=n, on_progress=tell)

    async def achat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = True,
    ) -> list[Completion]:
        """`chat` for `await`."""
        arguments.check_n(n)
        several = arguments.conversations_of(messages)
        with bar.shown(n * len(several), wanted=progress) as tell:
            return await self.cluster.agenerate_all(conversations=several, params=params, n=n, on_progress=tell)

    def close(self) -> None:
        """Unload the model; stop the engines if this object started them."""
        if self._owned:
            self.cluster.stop()
        elif self.cluster.model is self.report:
            self.cluster.unload()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

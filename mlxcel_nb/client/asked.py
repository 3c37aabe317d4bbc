"""What a cluster can be asked once it has a model: text, one answer or many, and what is kept of it."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxcel_nb.client import asking, batch
from mlxcel_nb.client.model import Model
from mlxcel_nb.client.report import BatchProgress, Completion
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.client.twins import AsyncTwins
from mlxcel_nb.models.params import SamplingParams

if TYPE_CHECKING:
    from mlxcel_nb.client.forcing import Forced
    from mlxcel_nb.client.saved_kv import KvReport


class Asked(AsyncTwins):
    """What `Cluster` inherits; the model is its own."""

    @abstractmethod
    def _held(self) -> Model:
        """The model that is loaded.

        Raises:
            ClusterError: none is.
        """

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
        caller: str | None = None,
    ) -> Stream:
        """Start a request; iterate over what is returned.

        Args:
            prompt: text, or token ids.
            messages: a conversation instead, rendered with the model's chat template.
            rank: of expert-parallel ranks the one that is to hold it; they take turns when None.
            caller: for whom, where this program asks for several: who asks much does not keep the others waiting.

        Raises:
            RequestError: an argument that is none. MlxcelError: the leader is lost.
        """
        model = self._held()
        return model.stream(
            prompt, SamplingParams() if params is None else params, messages=messages, rank=rank, caller=caller
        )

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        params: SamplingParams | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        rank: int | None = None,
    ) -> Completion:
        """`stream` and wait for the end. An interrupt cancels the request on every rank."""
        return asking.finish(self.stream(prompt, params, messages=messages, rank=rank))

    def generate_all(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        conversations: Sequence[list[dict[str, Any]]] | None = None,
        n: int = 1,
        on_progress: Callable[[BatchProgress], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Many requests, answered together, in the order of the prompts.

        While the engines are busy with what others ask, the requests wait for their turn. An interrupt cancels all.

        Args:
            prompts: each text, or token ids.
            params: for all, or one for each prompt.
            conversations: messages in place of prompts.
            n: answers to each prompt, which come side by side; a seed counts for the first, and the others' follow.
            on_progress: called on this thread with what has been made so far.
            stopped: asked ten times a second; once it is true all are cancelled.

        Raises:
            MlxcelError: the first request that failed, with the number of its prompt; the others are cancelled.
            Cancelled: `stopped`.
        """
        wanted = batch.asks(prompts, params, conversations=conversations, n=n)
        model = self._held()
        return batch.run(
            wanted,
            lambda ask: model.stream(ask.prompt, ask.params, messages=ask.messages),
            most=batch.MOST * len(model.replicas),
            n=n,
            on_progress=on_progress,
            stopped=stopped,
        )

    def save_kv(
        self,
        name: str,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        conversation: Sequence[Mapping[str, str]] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> KvReport:
        """Save keys and values of the last request, prompt and answer, or of a prompt, which is read first.

        Args:
            name: of the file; one that is there is replaced.
            prompt: text, or token ids.
            messages: a conversation instead, rendered with the model's chat template.
            conversation: turns to save along, for whoever goes on with it.
            on_progress: told tokens, done and in all.

        Raises:
            RequestError: a model whose keys and values cannot be taken apart, or nothing that is kept. ModelError: no
                room on the disk.
        """
        return self._held().save_kv(name, prompt, messages=messages, conversation=conversation, on_progress=on_progress)

    def load_kv(self, name: str, *, on_progress: Callable[[int, int], None] | None = None) -> KvReport:
        """Have the engines keep what `save_kv` has saved of the same model, in whatever layout it was and is.

        A request that begins alike does not read that again. What there is no room for is left out; the report says
        how many tokens are kept.

        Raises:
            ConfigError: it was saved of another model, or in another type. ModelError: no such file, or not whole.
        """
        return self._held().load_kv(name, on_progress=on_progress)

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Meanwhile no answer counts as the last one that `status` tells of: they are not the user's."""
        return self._held().aside()

    def forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Forced:
        """Feed `tokens` after `prompt`, whatever the model would choose, and bring logits and layers from the engines.

        For `verify`, which compares layouts.
        """
        return self._held().forced(prompt, tokens)

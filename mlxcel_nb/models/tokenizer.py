"""Text to ids and back, and chat prompts, for a model folder.

A folder with a tokenizer.json is read by the `tokenizers` library alone, in a tenth of the time that importing
transformers takes; others go through transformers, local files only and without remote code. Ids are those of
transformers' AutoTokenizer. Safe to share between threads. Chat templates are not trusted: they run in Jinja's
immutable sandbox and see plain data only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlxcel_nb.errors import ModelError, PromptError, PromptTooLong
from mlxcel_nb.models.chat import ChatTemplates, chat_templates
from mlxcel_nb.models.folder import read_json
from mlxcel_nb.models.reach import NOT_KNOWN, Reach, reach
from mlxcel_nb.models.text import named_bytes

LONG = 1 << 16
"""Characters that take some 0.05 s to read. A node that a longer text held up would be taken for dead."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Backend(Protocol):
    """What does the work: one of the two libraries."""

    vocab_size: int

    def encode(self, text: str, add_special: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special: bool) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token: int) -> str | None: ...

    def to_json(self) -> str | None: ...

    def reach(self) -> Reach: ...


class Tokenizer:
    """A model's tokenizer. Made by `load_tokenizer`.

    Attributes:
        vocab_size: number of ids, added tokens included.
        bos_id: what a sequence begins with, if the model has such a token.
        eos_ids: every id that ends an answer.
        special_tokens: named tokens as text, such as `bos_token`.
    """

    def __init__(
        self,
        backend: Backend,
        templates: ChatTemplates | None,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: frozenset[int],
    ) -> None:
        self._backend = backend
        self._templates = templates
        self.special_tokens = dict(special_tokens)
        self.eos_ids = eos_ids
        self.vocab_size = backend.vocab_size
        bos = self.special_tokens.get("bos_token")
        self.bos_id = backend.token_to_id(bos) if bos else None

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None

    def encode(self, text: str, add_special: bool = True, *, context: int = 0) -> list[int]:
        """Ids of `text`.

        Args:
            add_special: put in what the model expects around a sequence, as its configuration says.
            context: tokens that there is room for; 0 for any number. A text that cannot be so few is not read.

        Raises:
            PromptTooLong: it has more characters than `context` tokens can stand for. PromptError: it is no Unicode.
        """
        if context and len(text) > LONG and not self._reach.fits(text, context):
            most = context * self._reach.most
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, the model's context of {context} tokens holds {most} at most",
                advice="Shorten it.",
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the text has a lone surrogate at position {error.start}") from error
        return self._backend.encode(text, add_special)

    @functools.cached_property
    def _reach(self) -> Reach:
        """What tokens stand for at most. The whole vocabulary is looked at, once."""
        return self._backend.reach()

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`. Ids beyond the vocabulary, which a padded output layer can yield, are no text."""
        return self._backend.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special)

    def bytes_of(self, token: int) -> bytes | None:
        """What a token stands for, where its name in the vocabulary says so: also for part of a character."""
        return named_bytes(self._backend.id_to_token(token) or "") if 0 <= token < self.vocab_size else None

    def to_json(self) -> str | None:
        """The tokenizer as the `tokenizers` library writes it, added tokens included; None for one it cannot hold."""
        return self._backend.to_json()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of `messages`.

        Raises:
            PromptError: a base model without a template, or the template refused; its own words are the message.
        """
        if self._templates is None:
            raise PromptError(
                "the model has no chat template: it is a base model",
                advice="Base model: use completion (a plain prompt) instead of chat.",
            )
        return self._templates.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **variables},
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        context: int = 0,
    ) -> list[int]:
        """Ids of what `render_chat` makes of `messages`. The template itself writes the special tokens.

        Args:
            variables: of the template; callers name them, whatever an argument is called here.
            context: as `encode` takes it.
        """
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **(variables or {}))
        return self.encode(text, add_special=False, context=context)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the model folder `path`.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    folder = Path(path)
    config = read_json(folder / "tokenizer_config.json")
    special = _special_tokens(folder, config)
    if (folder / "tokenizer.json").is_file():
        backend: Backend = _FastBackend(folder, config, special)
    else:
        backend = _TransformersBackend(folder)
    return Tokenizer(
        backend,
        chat_templates(folder, config),
        special_tokens=special,
        eos_ids=_eos_ids(folder, special, backend),
    )


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Named tokens as text. Files write a token as a string or as an object with a `content`."""
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    found = {}
    for name in _SPECIAL:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_ids(folder: Path, special: dict[str, str], backend: Backend) -> frozenset[int]:
    """Ids that end an answer, by any of the files that may say so."""
    ids: set[int] = set()
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    for source in (read_json(folder / "generation_config.json"), config, text_config):
        value = source.get("eos_token_id") if isinstance(source, dict) else None
        ids.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    if (token := special.get("eos_token")) and (i := backend.token_to_id(token)) is not None:
        ids.add(i)
    return frozenset(ids)


class _FastBackend:
    """tokenizer.json, with the tokens that transformers adds to it from tokenizer_config.json.

    What goes around a sequence is tokenizer.json's post-processor alone: transformers 5 takes no notice of
    `add_bos_token` beside one.
    """

    def __init__(self, folder: Path, config: dict[str, Any], special: dict[str, str]) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._add_tokens(config, special)
        except Exception as error:  # the library raises no narrower one
            raise ModelError(f"{file} cannot be read: {error}", advice="Get the model again.") from error
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool) -> list[int]:
        if len(text) > LONG:  # the call for several lets other threads run meanwhile
            return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special)[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def id_to_token(self, token: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def to_json(self) -> str | None:
        return str(self._tokenizer.to_str())

    def reach(self) -> Reach:
        return _reach_of(self._tokenizer)

    def _add_tokens(self, config: dict[str, Any], special: dict[str, str]) -> None:
        """Tokens that only tokenizer_config.json declares, in the order of their ids, then the named ones."""
        from tokenizers import AddedToken

        known = {(token.content, token.special) for token in self._tokenizer.get_added_tokens_decoder().values()}
        declared = config.get("added_tokens_decoder")
        entries = declared.items() if isinstance(declared, dict) else []
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        for _, entry in sorted(entries, key=lambda item: int(item[0])):
            if (entry["content"], bool(entry.get("special"))) not in known:
                options = {flag: bool(entry[flag]) for flag in flags if flag in entry}
                self._tokenizer.add_tokens([AddedToken(entry["content"], **options)])
        contents = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        named = [*special.values(), *(extra.values() if isinstance(extra, dict) else extra)]
        texts = [token["content"] if isinstance(token, dict) else str(token) for token in named]
        missing = [token for token in texts if token not in contents]
        self._tokenizer.add_special_tokens([AddedToken(token, special=True) for token in dict.fromkeys(missing)])


class _TransformersBackend:
    """Whatever else transformers knows: SentencePiece models, tiktoken files, vocabularies of older kinds."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # many libraries lie below
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{folder} has no tokenizer that can be read: {reason}") from error
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str, add_special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special))

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def token_to_id(self, token: str) -> int | None:
        found = self._tokenizer.convert_tokens_to_ids(token)
        return found if isinstance(found, int) else None

    def id_to_token(self, token: int) -> str | None:
        found = self._tokenizer.convert_ids_to_tokens(token)
        return found if isinstance(found, str) else None

    def to_json(self) -> str | None:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return None if fast is None else str(fast.to_str())

    def reach(self) -> Reach:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        return NOT_KNOWN if fast is None else _reach_of(fast)


def _reach_of(tokenizer: Any) -> Reach:
    """`reach` of a tokenizer of the `tokenizers` library."""
    from tokenizers.models import BPE

    model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
    if not isinstance(model, BPE) or any(token.lstrip or token.rstrip for token in added):
        return NOT_KNOWN

    def described(part: Any) -> Any:
        return None if part is None else json.loads(part.__getstate__())

    return reach(
        tokenizer.get_vocab(with_added_tokens=True),
        normalizer=described(tokenizer.normalizer),
        pre_tokenizer=described(tokenizer.pre_tokenizer),
        unknown=model.unk_token,
        fused=model.fuse_unk,
        byte_fallback=model.byte_fallback,
    )

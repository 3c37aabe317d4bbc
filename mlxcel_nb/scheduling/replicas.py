"""Which replica of a model a request goes to. Pure.

To the one with least under way, unless another has most of the prompt's beginning in its caches and is not much
busier (after SGLang's cache-aware load balancing, Zheng et al. 2024). What a replica has read is known by hashes of
its prompts' blocks, each chained to those before it, so one hash stands for a whole beginning, and no prompt is kept.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.scheduling.step_plan import BLOCK

CHARACTERS = 4 * BLOCK
"""Of a prompt that is text, so many stand for a block of tokens: about four to a token in English."""

MOST_BLOCKS = 512
"""Of one prompt that are looked at: 16,384 tokens, beyond which what differs is a small part."""

REMEMBERED = 1 << 16
"""Blocks; those used least recently are forgotten."""

SHARE = 0.5
"""A replica that has read at least this share of a prompt's blocks is preferred."""

MUCH, MORE = 2, 4
"""A replica with over MUCH times as many requests as the least busy one, and MORE, is much busier."""

PREFIX_AWARE, LEAST_LOADED, MEMORY_AWARE, ROUND_ROBIN = "prefix-aware", "least-loaded", "memory-aware", "round-robin"
POLICIES = (PREFIX_AWARE, LEAST_LOADED, MEMORY_AWARE, ROUND_ROBIN)
"""Ways to choose: to whom has read the beginning, or is idlest; to the idlest; to the one with most room for keys and
values, by tenths of it; in turn."""

_WIDEST = 2**64 - 1

Key = bytes


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a replica has to do.

    Args:
        requests: under way, whoever asked.
        tokens: of those that are ours: to be read and to be made.
        turn: when it was chosen last, counted in choices.
        memory: the share of its room for keys and values that is in use, as it said last.
    """

    requests: int = 0
    tokens: int = 0
    turn: int = 0
    memory: float = 0.0

    @property
    def load(self) -> tuple[int, int, int]:
        """What replicas are compared by. The one chosen longest ago comes first among equals."""
        return (self.requests, self.tokens, self.turn)


def check_policy(policy: str) -> None:
    """Refuse what is no way to choose.

    Raises:
        ConfigError: naming what there is.
    """
    if policy not in POLICIES:
        raise ConfigError(f"route {policy!r:.40}", advice=f"Use {', '.join(POLICIES)}.")


def keys_of(prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[Key]:
    """A key for each whole block that the prompt begins with: text, token ids, or messages."""
    if isinstance(prompt, str):
        text, step = prompt.encode(errors="surrogatepass"), CHARACTERS
    elif prompt and isinstance(prompt[0], Mapping):
        text, step = "".join(map(repr, prompt)).encode(errors="surrogatepass"), CHARACTERS
    else:
        ids = [each & _WIDEST for each in prompt if isinstance(each, int)]
        text, step = array("Q", ids).tobytes(), array("Q").itemsize * BLOCK
    keys, key = [], b""
    for begin in range(0, min(len(text) - step + 1, MOST_BLOCKS * step), step):
        key = hashlib.blake2b(text[begin : begin + step], key=key, digest_size=16).digest()
        keys.append(key)
    return keys


class Prefixes:
    """Which replica has read which beginnings of prompts, as far as this client sent them there."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._readers: OrderedDict[Key, set[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._readers)

    def note(self, keys: Sequence[Key], replica: int) -> None:
        """`replica` reads a prompt with these keys."""
        for key in reversed(keys):  # the first blocks are the newest, so that a beginning is forgotten from its end
            self._readers.setdefault(key, set()).add(replica)
            self._readers.move_to_end(key)
        while len(self._readers) > self._most:
            self._readers.popitem(last=False)

    def matched(self, keys: Sequence[Key]) -> dict[int, int]:
        """For each replica that has read some of the first blocks, how many."""
        found: dict[int, int] = {}
        for count, key in enumerate(keys):
            readers = [replica for replica in self._readers.get(key, ()) if found.get(replica, 0) == count]
            if not readers:
                break
            found.update(dict.fromkeys(readers, count + 1))
        return found


def choose(
    standings: Mapping[int, Standing], matched: Mapping[int, int], blocks: int, policy: str = PREFIX_AWARE
) -> int:
    """One of `standings`, by its number.

    Args:
        standings: of the replicas that can be chosen, at least one.
        matched: blocks of the prompt's beginning that a replica has read.
        blocks: of the prompt.
        policy: one of `POLICIES`.
    """
    if policy == ROUND_ROBIN:
        return min(standings, key=lambda number: (standings[number].turn, number))
    if policy == MEMORY_AWARE:  # in tenths: what differs by less is the same, and the load decides
        return min(standings, key=lambda number: (int(10 * standings[number].memory), standings[number].load, number))
    idlest = min(standings, key=lambda number: (standings[number].load, number))
    if policy == LEAST_LOADED:
        return idlest
    reader = min(standings, key=lambda number: (-matched.get(number, 0), standings[number].load, number))
    much = MUCH * standings[idlest].requests + MORE
    if blocks and matched.get(reader, 0) >= SHARE * blocks and standings[reader].requests <= much:
        return reader
    return idlest

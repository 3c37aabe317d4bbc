"""Answers of a given form: which tokens may come next, by a JSON schema, a regular expression or a grammar.

The work is llguidance's: it walks a grammar over the bytes of every token of the vocabulary at once. It is imported
when the first request asks for it, on the sampling rank, in the MLX thread; `check` may run anywhere. Schemas and
grammars come from users: the library fetches nothing and bounds what a grammar may cost to build and to step through.
Where its bounds do not reach, in repetitions of repetitions and long chains of references, there are some here.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mlxcel_nb.errors import FormError
from mlxcel_nb.models.params import SamplingParams

if TYPE_CHECKING:
    from mlxcel_nb.models.tokenizer import Tokenizer

T = TypeVar("T")

ANY_OBJECT = '{"type":"object"}'

GAPS = r"( |\n {0,40})?"
"""White space between parts of JSON: a space, or a new line and its indent. Without a bound a small model may go on
with white space until the limit of tokens, which is legal JSON and no answer."""

MAX_REPEATED = 10_000
"""What the counted repetitions of a regular expression may add to it, written out, in characters: a step costs some
50 ms then, and a hundred times as many cost seconds."""

MAX_STEP_CPU_S = 0.5
"""Processor time of one step after which an answer's form is given up: every other row waits for it. A usual step takes
under a millisecond."""

STACK = 128 << 20
"""Bytes of stack on which a grammar is read. The library follows references by recursion, and a stack that overflows
there kills the process: the longest chain that `MAX_CONSTRAINT` bytes can spell fits into less than half of it."""

LONGEST_REASON = 300
"""Characters of what the library says that a user is shown."""


class Constraint:
    """The form of one answer, as far as it has come. Made by `Constraints.begin`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, size: int) -> NDArray[np.bool_]:
        """Which of `size` tokens may come next; the end-of-text token only where the answer may end.

        Raises:
            FormError: the grammar cannot be gone on with, or could not be begun: why.
        """
        self._check()
        began = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        if (took := time.thread_time() - began) > MAX_STEP_CPU_S:
            raise FormError(f"the answer's form is too costly to keep to: {took:.1f} s for a token")
        found = np.unpackbits(bits, count=min(size, 8 * bits.size), bitorder="little").view(np.bool_)
        return found if found.size == size else np.pad(found, (0, size - found.size))

    def accept(self, token: int) -> None:
        """Go on with `token`. One that may not come is told of by the next `mask`."""
        self._matcher.consume_token(token)

    def _check(self) -> None:
        if self._matcher.is_error():
            said = self._matcher.get_error()
            reason = "it allows no text" if said.startswith("NoExtension") else _reason(said)
            raise FormError(f"the answer's form cannot be kept to: {reason}")


class Constraints:
    """Begins constraints for one model. Its tables of the vocabulary are made once, at the first.

    Args:
        tokenizer: gives the model's tokenizer, and is called once at most.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer
        self._tables: Any = None

    def begin(self, params: SamplingParams, made: Sequence[int] = ()) -> Constraint:
        """The constraint that `params` ask for.

        Args:
            made: the tokens that the answer has already, all of them.

        Raises:
            FormError: the library refuses it, or the tokenizer is of a kind that it cannot read.
        """
        from llguidance import LLMatcher

        if self._tables is None:
            self._tables = _tables(self._tokenizer())
        grammar, tables = _grammar(params), self._tables
        matcher = _deep(lambda: LLMatcher(tables, grammar, log_level=0, limits=_limits()))
        if matcher.is_error():
            raise _refusal(params, matcher.get_error())
        if made and not matcher.consume_tokens(list(made)):
            raise FormError("the tokens that the answer has do not fit the form asked for")
        return Constraint(matcher)


def check(params: SamplingParams) -> None:
    """Refuse a constraint that no model could keep to, before any rank hears of the request.

    Raises:
        FormError: why.
    """
    if not params.constrained:
        return
    from llguidance import LLMatcher

    grammar = _grammar(params)
    failed, said = _deep(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits()))
    if failed:
        raise _refusal(params, said[0])


def _tables(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer

    described = tokenizer.to_json()
    ends = sorted(i for i in tokenizer.eos_ids if i < tokenizer.vocab_size)
    if described is None:
        raise FormError("the model's tokenizer is of a kind that an answer's form cannot be kept to with")
    if not ends:
        raise FormError("the model has no end-of-text token, so an answer of a given form could not end")
    try:
        return LLTokenizer(described, n_vocab=tokenizer.vocab_size, eos_token=ends)
    except ValueError as error:
        raise FormError(f"the model's tokenizer cannot be used for an answer's form: {_reason(str(error))}") from None


def _grammar(params: SamplingParams) -> str:
    """What the library is told."""
    from llguidance import LLMatcher, regex_to_lark

    if params.regex is not None:
        _check_repetitions(params.regex, "regex")
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(params.regex, 'd')}/")
    if params.grammar is not None:
        _check_repetitions(params.grammar, "grammar")
        return LLMatcher.grammar_from_lark(params.grammar)
    assert params.json_schema is None or isinstance(params.json_schema, str)
    schema = json.loads(params.json_schema or ANY_OBJECT)
    schema.pop("x-guidance", None)  # where the library takes options from
    for pattern in _patterns(schema):
        _check_repetitions(pattern, "a pattern of json_schema")
    try:
        options: Any = {"whitespace_pattern": GAPS, "coerce_one_of": True}
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except (ValueError, RecursionError) as error:  # what Python takes for JSON, such as NaN, and how deep it goes
        raise _refusal(params, str(error)) from None


def _deep(work: Callable[[], T]) -> T:
    """What `work` gives, done on a stack of `STACK` bytes. It ends by itself: the library's limits bound it."""
    with ThreadPoolExecutor(1, "grammar") as pool:
        before = threading.stack_size(STACK)
        try:
            done = pool.submit(work)  # starts the thread
        finally:
            threading.stack_size(before)
        return done.result()


def _patterns(schema: Any) -> Iterator[str]:
    """Regular expressions in a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                yield pattern
            if isinstance(named := part.get("patternProperties"), dict):
                yield from named
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d{1,9})(?:,(\d{0,9}))?\}|.", re.DOTALL)
"""Of a regular expression: an escape, a class, a counted repetition with its bounds, or one character."""


def _check_repetitions(pattern: str, name: str) -> None:
    """Refuse what grows too large when its counted repetitions are written out. Of a grammar it sees those on the spot.

    Raises:
        FormError: naming `name`.
    """
    sizes, last, total = [0], 0, 0  # of the groups that are open, of what a repetition would repeat, and of all
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            sizes.append(0)
        elif text == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif piece[1]:
            times = max(1, int(piece[2] or piece[1]))
            sizes[-1] += last * (times - 1)
            total += last * (times - 1)
            last *= times
        elif text not in "|*+?":
            last = 1
            sizes[-1] += 1
            total += 1
        if (added := total - len(pattern)) > MAX_REPEATED:
            what = f"{name} repeats parts of itself over {added} characters"
            raise FormError(what, advice=f"At most {MAX_REPEATED} are allowed.")


def _limits() -> Any:
    """The library's own bounds, tens of milliseconds to build or to step, and errors that quote no answer."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def _refusal(params: SamplingParams, said: str) -> FormError:
    name = "regex" if params.regex is not None else "grammar" if params.grammar is not None else "json_schema"
    return FormError(f"{name} cannot be used: {_reason(said)}")


def _reason(said: str) -> str:
    """The words of an error that say why, without the drawing of where."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    reason = (errors or lines or ["no reason given"])[0]
    return reason if len(reason) <= LONGEST_REASON else reason[:LONGEST_REASON] + "…"

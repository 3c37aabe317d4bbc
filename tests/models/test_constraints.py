"""An answer of a given form is of that form whatever the model would say, and ends only where it may."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import FormError
from mlxcel_nb.models import constraints as module
from mlxcel_nb.models.constraints import Constraints, check
from mlxcel_nb.models.gguf import convert
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.sampling import Sampled, Sampler, sample_rows
from mlxcel_nb.models.tokenizer import Tokenizer, load_tokenizer
from tests.models.gguf_files import sentencepieces, write_gguf
from tests.tiny import make_tiny

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 20}, "b": {"enum": ["x", "é"]}},
    "required": ["n", "b"],
    "additionalProperties": False,
}
CODE = SamplingParams(regex=r"[a-z]{3}-\d+")
YES = SamplingParams(grammar='start: "yes" | "no" WS "way"\nWS: " "')


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def constraints(tokenizer: Tokenizer) -> Constraints:
    return Constraints(lambda: tokenizer)


def at_random(constraints: Constraints, tokenizer: Tokenizer, params: SamplingParams, seed: int) -> str:
    """A text that any model might write: each token is drawn from those that may come."""
    constraint, drawn, ids = constraints.begin(params), np.random.default_rng(seed), []
    for _ in range(2000):
        token = int(drawn.choice(np.flatnonzero(constraint.mask(tokenizer.vocab_size))))
        if token in tokenizer.eos_ids:
            return tokenizer.decode(ids)
        ids.append(token)
        constraint.accept(token)
    raise AssertionError("it did not end")


def fits(constraints: Constraints, tokenizer: Tokenizer, params: SamplingParams, text: str) -> bool:
    """Whether a model that would write `text` may do so and then end."""
    constraint = constraints.begin(params)
    for token in tokenizer.encode(text, add_special=False):
        if not constraint.mask(tokenizer.vocab_size)[token]:
            return False
        constraint.accept(token)
    ends = constraint.mask(tokenizer.vocab_size)[sorted(tokenizer.eos_ids)]
    assert ends.all() or not ends.any()
    return bool(ends.all())


def follows(text: str) -> None:
    """`text` is of `SCHEMA`."""
    found = json.loads(text)
    assert set(found) == {"n", "b"}
    assert type(found["n"]) is int and 1 <= found["n"] <= 20
    assert found["b"] in ("x", "é")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_is_of_the_form(constraints: Constraints, tokenizer: Tokenizer, seed: int) -> None:
    assert re.fullmatch(r"[a-z]{3}-\d+", at_random(constraints, tokenizer, CODE, seed))
    assert at_random(constraints, tokenizer, YES, seed) in ("yes", "no way")
    follows(at_random(constraints, tokenizer, SamplingParams(json_schema=SCHEMA), seed))


def test_a_regular_expression_may_hold_what_ends_one_elsewhere(constraints: Constraints, tokenizer: Tokenizer) -> None:
    assert fits(constraints, tokenizer, SamplingParams(regex=r"a/[\d/]+\n\D"), "a/1/2\nx")
    assert fits(constraints, tokenizer, SamplingParams(regex="a\nb|c"), "a\nb")
    assert not fits(constraints, tokenizer, SamplingParams(regex=r"\d"), "७")


def test_json_may_be_written_as_models_write_it_and_ends_where_it_is_whole(
    constraints: Constraints, tokenizer: Tokenizer
) -> None:
    schema, any_object = SamplingParams(json_schema=json.dumps(SCHEMA)), SamplingParams(json_object=True)
    value = {"n": 3, "b": "é"}
    for text in (
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, indent=2, ensure_ascii=False),
        '{"n":3,"b":"x"}',
    ):
        assert fits(constraints, tokenizer, schema, text)
        assert fits(constraints, tokenizer, any_object, text)
    for text in ('{"n": 3', "", '{"n": 21, "b": "x"}', '{"b": "x"}', "[]", "Sure! {}"):
        assert not fits(constraints, tokenizer, schema, text)
    assert fits(constraints, tokenizer, any_object, '{"any": [1, {"thing": null}]}')
    assert not fits(constraints, tokenizer, any_object, "[1]")


def test_white_space_in_json_has_a_bound(constraints: Constraints, tokenizer: Tokenizer) -> None:
    """A small model that likes line ends would write nothing else."""
    assert not fits(constraints, tokenizer, SamplingParams(json_object=True), "{\n\n}")


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"regex": "((("}, "regex cannot be used: unclosed group"),
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"grammar": "start: nothing"}, 'grammar cannot be used: .*unknown name: "nothing"'),
        ({"grammar": 'begin: "a"'}, "no start rule"),
        ({"json_schema": {"type": "text"}}, "json_schema cannot be used: Invalid type: text"),
        ({"json_schema": {"$ref": "file:///etc/hostname"}}, "does not fetch"),
        ({"json_schema": {"uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "string", "pattern": "(("}}, "unclosed group"),
        ({"json_schema": {"anyOf": []}}, "anyOf is empty"),
        ({"json_schema": '{"const": NaN}'}, "json_schema cannot be used: expected value"),
        ({"json_schema": '{"const": "\\ud800"}'}, "json_schema cannot be used: .*escape"),
        ({"json_schema": '{"minimum": 1e999}'}, "json_schema cannot be used: expected value"),
        ({"json_schema": '{"items":' * 500 + "{}" + "}" * 500}, "json_schema cannot be used: recursion"),
        ({"regex": "(" * 30_000 + "a" + ")" * 30_000}, "nested"),
        ({"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000}, "nested"),
    ],
)
def test_what_the_library_refuses_is_told_in_a_line(constraints: Constraints, params: dict[str, Any], why: str) -> None:
    with pytest.raises(FormError, match=why) as early:
        check(SamplingParams(**params))
    with pytest.raises(FormError, match=why) as late:
        constraints.begin(SamplingParams(**params))
    for caught in (early, late):
        assert len(caught.value.lines()) == 1
        assert len(str(caught.value)) < 400


def test_what_may_be_asked_for_is_let_through() -> None:
    for params in (CODE, YES, SamplingParams(json_schema=SCHEMA), SamplingParams(json_object=True), SamplingParams()):
        check(params)


@pytest.mark.parametrize(
    "params",
    [
        {"regex": "(a{1000}){1000}"},
        {"regex": "((a{10,}b{2,100}){100}|c){100}"},
        {"regex": r"([^\]]\){99999999}"},
        {"json_schema": {"type": "object", "properties": {"pattern": {"pattern": "a{30000}"}}}},
        {"json_schema": {"patternProperties": {"(a{300}){300}": {}}}},
        {"grammar": 'start: A\nA: ("a"{1000}){1000}'},
    ],
)
def test_repetitions_of_repetitions_are_refused_before_they_cost(params: dict[str, Any]) -> None:
    with pytest.raises(FormError, match="repeats parts of itself"):
        check(SamplingParams(**params))


def chain(links: int) -> dict[str, Any]:
    """A schema of references, each to the next."""
    ends = {str(links): {"type": "string"}}
    steps = {str(i): {"anyOf": [{"type": "null"}, {"items": {"$ref": f"#/$defs/{i + 1}"}}]} for i in range(links)}
    return {"$ref": "#/$defs/0", "$defs": {**steps, **ends}}


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": chain(950)},
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(5000)) + '\na5000: "a"'},
        {"grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(5000)) + '\nA5000: "a"'},
    ],
    ids=["references", "rules", "tokens"],
)
def test_the_longest_chain_of_references_does_not_overflow_a_stack(
    constraints: Constraints, params: dict[str, Any]
) -> None:
    """On a usual stack the process would be gone, and the engine with it."""
    check(SamplingParams(**params))
    constraint = constraints.begin(SamplingParams(**params))
    assert constraint.mask(49152).any()


def test_a_form_without_any_text_is_told_of_at_the_first_token(constraints: Constraints) -> None:
    with pytest.raises(FormError, match="it allows no text"):
        constraints.begin(SamplingParams(json_schema={"$ref": "#"})).mask(49152)


def test_one_of_several_is_any_of_them_and_options_for_the_library_are_not_taken(
    constraints: Constraints, tokenizer: Tokenizer
) -> None:
    kinds = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")]
    params = SamplingParams(json_schema={"oneOf": kinds, "x-guidance": {"whitespace_pattern": "((("}})
    assert fits(constraints, tokenizer, params, '{"k": "b"}')
    assert not fits(constraints, tokenizer, params, '{"k": "c"}')


def test_usual_repetitions_are_not(constraints: Constraints) -> None:
    for regex in (r"\{100000\}[{100000}]", "(a{30}){30}", "a{,5}b", r"(\d{1,3}\.){3}\d{1,3}", ")a{3}"):
        module._check_repetitions(regex, "regex")


def test_a_step_that_costs_too_much_ends_its_own_request(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STEP_CPU_S", -1.0)
    found = sample_rows([Sampler(CODE, constraints=constraints), Sampler(SamplingParams())], mx.zeros((2, 49152)))
    assert isinstance(found[0], FormError)
    assert "too costly" in str(found[0])
    assert isinstance(found[1], Sampled)


# ---------------------------------------------------------------------------------------------------- in a sampler


def answer_of(sampler: Sampler, tokenizer: Tokenizer, logits: mx.array, start: int = 0) -> list[int]:
    ids = []
    for row in logits[start:]:
        (sampled,) = sample_rows([sampler], row[None])
        assert isinstance(sampled, Sampled)
        token = sampled.token
        if token in tokenizer.eos_ids:
            break
        ids.append(token)
    return ids


@pytest.fixture(scope="module")
def logits(tokenizer: Tokenizer) -> mx.array:
    return mx.random.normal((120, tokenizer.vocab_size + 64), key=mx.random.key(5)) * 4


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 2, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_a_request_that_is_put_back_keeps_to_its_form(
    constraints: Constraints, tokenizer: Tokenizer, logits: mx.array, options: dict[str, Any]
) -> None:
    params = SamplingParams(json_schema=SCHEMA, **options)
    whole = answer_of(Sampler(params, eos_ids=tokenizer.eos_ids, constraints=constraints), tokenizer, logits)
    follows(tokenizer.decode(whole))
    for split in (1, len(whole) - 1):
        context = [1, 2, 3, *whole[:split]]
        again = Sampler(params, context, split, eos_ids=tokenizer.eos_ids, constraints=constraints)
        assert answer_of(again, tokenizer, logits, split) == whole[split:]


def test_the_form_is_above_the_least_length(constraints: Constraints, tokenizer: Tokenizer, logits: mx.array) -> None:
    """Where nothing but the end may come, it comes."""
    params = SamplingParams(grammar='start: "yes"', min_tokens=50)
    ids = answer_of(Sampler(params, eos_ids=tokenizer.eos_ids, constraints=constraints), tokenizer, logits)
    assert tokenizer.decode(ids) == "yes"
    longer = SamplingParams(regex="[a-z]+", min_tokens=50)
    ids = answer_of(Sampler(longer, eos_ids=tokenizer.eos_ids, constraints=constraints), tokenizer, logits)
    assert len(ids) >= 50


def test_a_form_that_cannot_be_begun_is_an_error_of_its_own_row(constraints: Constraints) -> None:
    rows = [
        Sampler(SamplingParams(regex="(((" ), constraints=constraints),
        Sampler(CODE),
        Sampler(CODE, [5, 6], 2, constraints=constraints),
        Sampler(SamplingParams()),
        Sampler(CODE, constraints=constraints),
    ]  # fmt: skip
    found = sample_rows(rows, mx.zeros((5, 49152)))
    assert [type(each) for each in found] == [FormError, FormError, FormError, Sampled, Sampled]
    assert "do not fit" in str(found[2])


# ---------------------------------------------------------------------------------------------------- tokenizers


def test_the_tables_of_a_model_are_made_once(tokenizer: Tokenizer) -> None:
    asked = []
    constraints = Constraints(lambda: asked.append(1) or tokenizer)  # type: ignore[func-returns-value]
    assert not asked
    for _ in range(3):
        constraints.begin(CODE)
    assert asked == [1]


def begun(tokenizer: Tokenizer) -> Constraints:
    return Constraints(lambda: tokenizer)


def test_a_tokenizer_of_bytes_serves(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tiny(tmp_path))
    follows(at_random(begun(tokenizer), tokenizer, SamplingParams(json_schema=SCHEMA), 1))
    assert fits(begun(tokenizer), tokenizer, SamplingParams(regex="né+"), "néé")


def test_a_gguf_file_s_tokenizer_serves(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "tiny").mkdir()
    convert(tmp_path / "tiny.gguf", tmp_path / "tiny", precision="float32")
    tokenizer = load_tokenizer(tmp_path / "tiny")
    follows(at_random(begun(tokenizer), tokenizer, SamplingParams(json_schema=SCHEMA), 1))
    assert fits(begun(tokenizer), tokenizer, SamplingParams(regex="the the+"), "the thee")


def test_a_tokenizer_of_sentencepieces_serves(tmp_path: Path) -> None:
    tokenizer, _ = sentencepieces(tmp_path)
    params = SamplingParams(regex=r" ?the quick( \w+)+ é🙂")  # its words begin with a space, the first as well
    assert fits(begun(tokenizer), tokenizer, params, "the quick brown fox é🙂")
    assert re.fullmatch(
        "the lazy( dog){2}", at_random(begun(tokenizer), tokenizer, SamplingParams(regex="the lazy( dog){2}"), 1)
    )
    follows(at_random(begun(tokenizer), tokenizer, SamplingParams(json_schema=SCHEMA), 1))


def test_a_model_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, eos_token_id=None)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_ids = frozenset()
    with pytest.raises(FormError, match="no end-of-text token"):
        begun(tokenizer).begin(CODE)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer._backend.to_json = lambda: None
    with pytest.raises(FormError, match="of a kind that"):
        begun(tokenizer).begin(CODE)


def test_the_library_is_loaded_only_when_it_is_asked_for() -> None:
    code = (
        "import sys; from mlxcel_nb.models import constraints, sampling, params; p = params.SamplingParams;"
        "constraints.check(p()); sampling.Sampler(p()); print('llguidance' in sys.modules);"
        "constraints.check(p(regex='a')); print('llguidance' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.split() == ["False", "True", "False"], done.stderr

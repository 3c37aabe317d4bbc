"""GGUF files become model folders that mlx-lm runs, with the numbers, rows and settings that are in the file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.gguf import bfloat16_bits, convert, folder_bytes, llama3_factors
from mlxcel_nb.models.gguf_file import read_gguf
from mlxcel_nb.models.registry import Precision
from mlxcel_nb.models.tokenizer import load_tokenizer
from tests.models.gguf_files import HEADS, HIDDEN, write_gguf


def arrays_of(path: Path) -> dict[str, mx.array]:
    arrays = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays


PROMPT = mx.array([[5, 17, 130, 44, 260, 9, 77]])


def converted(tmp_path: Path, precision: Precision = "float32", **options) -> tuple[Path, dict[str, np.ndarray]]:
    held = write_gguf(tmp_path / "tiny.gguf", **options)
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder, precision=precision)
    return folder, held


def reference_logits(config: dict, held: dict[str, np.ndarray]) -> mx.array:
    """mlx-lm's Llama over the weights as they were before anything permuted or packed them."""
    from mlx_lm.models.llama import Model, ModelArgs

    model = Model(ModelArgs.from_dict({key: value for key, value in config.items() if key != "quantization"}))
    model.load_weights([(name, mx.array(array)) for name, array in held.items()])
    return model(PROMPT)


@pytest.mark.parametrize("quantise", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("precision", ["float32", "kept"])
def test_logits_are_those_of_the_weights_before_packing(tmp_path: Path, quantise: str, precision: Precision) -> None:
    folder, held = converted(tmp_path, precision, quantise=quantise)
    model, config = load_model(folder)
    want = reference_logits(config, held)
    got = model(PROMPT).astype(mx.float32)
    coarse = {"F32": 1e-5, "BF16": 0.2}.get(quantise, 0.05)  # activations follow the folder's float type
    assert float(mx.abs(got - want).max()) < (1e-5 if precision == "float32" else coarse)


@pytest.mark.parametrize("options", [{"tied": False}, {"bias": True}, {"tied": False, "bias": True}], ids=str)
def test_heads_and_biases_of_their_own_are_kept(tmp_path: Path, options: dict[str, bool]) -> None:
    folder, held = converted(tmp_path, **options)
    model, config = load_model(folder)
    assert config["tie_word_embeddings"] is options.get("tied", True)
    assert config["attention_bias"] is options.get("bias", False)
    assert float(mx.abs(model(PROMPT) - reference_logits(config, held)).max()) < 1e-5


def test_the_rows_of_q_and_k_are_put_back(tmp_path: Path) -> None:
    """Rotating neighbours over the file's rows scores as rotating halves over the folder's rows does."""
    folder, _ = converted(tmp_path)
    ours = arrays_of(folder / "model.safetensors")
    theirs = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors}
    x = mx.random.normal((1, 9, HIDDEN), key=mx.random.key(1))

    def scores(q: mx.array, k: mx.array, *, neighbours: bool) -> mx.array:
        def heads(weight: mx.array) -> mx.array:
            y = (x @ weight.T).reshape(1, 9, -1, HIDDEN // HEADS).swapaxes(1, 2)
            return mx.fast.rope(y, HIDDEN // HEADS, traditional=neighbours, base=10000.0, scale=1.0, offset=3)

        return heads(q) @ mx.repeat(heads(k), 2, axis=1).swapaxes(2, 3)

    file = scores(mx.array(theirs["blk.0.attn_q.weight"]), mx.array(theirs["blk.0.attn_k.weight"]), neighbours=True)
    stem = "model.layers.0.self_attn"
    back = scores(ours[f"{stem}.q_proj.weight"], ours[f"{stem}.k_proj.weight"], neighbours=False)
    wrong = scores(mx.array(theirs["blk.0.attn_q.weight"]), mx.array(theirs["blk.0.attn_k.weight"]), neighbours=False)
    assert float(mx.abs(file - back).max()) < 1e-4
    assert float(mx.abs(file - wrong).max()) > 1e-2


def test_llama_3s_rope_scaling_is_recognised_by_its_factors(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    factors = llama3_factors(500000.0, HIDDEN // HEADS, scaling).astype(np.float32)
    folder, _ = converted(tmp_path, extra={"rope_freqs.weight": factors}, metadata={"llama.rope.freq_base": 500000.0})
    model, config = load_model(folder)
    assert config["rope_scaling"] == {"rope_type": "llama3", **scaling}
    ours = np.array(model.layers[0].self_attn.rope._freqs)
    plain = 500000.0 ** (np.arange(0, HIDDEN // HEADS, 2) / (HIDDEN // HEADS))
    np.testing.assert_allclose(ours / plain, factors, rtol=1e-4)


@pytest.mark.parametrize(
    ("metadata", "want"),
    [
        ({}, None),
        ({"scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_of_the_metadata_is_kept(tmp_path: Path, metadata: dict, want: dict | None) -> None:
    folder, _ = converted(tmp_path, metadata={f"llama.rope.{key}": value for key, value in metadata.items()})
    model, config = load_model(folder)
    assert config["rope_scaling"] == want
    assert mx.isfinite(model(PROMPT)).all()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not supported"),
        ({"metadata": {"llama.expert_count": 8}}, "8 experts"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ({"extra": {"rope_freqs.weight": np.full(8, 3, np.float32)}}, "rope factors"),
        ({"extra": {"blk.0.attn_zork.weight": np.ones(8, np.float32)}}, r"blk\.0\.attn_zork\.weight has no place"),
        ({"tokenizer": {"pre": "zork"}}, "pre-tokenizer 'zork'"),
        ({"tokenizer": {"kind": "bert"}}, "tokenizer kind 'bert'"),
        ({"tokenizer": {}}, "holds no tokenizer"),
        ({"quantise": "MXFP4"}, "quantisation MXFP4 of"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path: Path, options: dict, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        converted(tmp_path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("precision", ["float32", "kept"])
def test_the_planned_size_is_the_size(tmp_path: Path, precision: Precision) -> None:
    folder, _ = converted(tmp_path, precision, quantise="Q4_1")
    size = sum(file.stat().st_size for file in folder.iterdir())
    assert size <= folder_bytes(tmp_path / "tiny.gguf", precision) < size + (9 << 20)


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    seen: list[tuple[str, int, int]] = []
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder, precision="float32", progress=lambda *event: seen.append(event))
    assert {stage for stage, _, _ in seen} == {"convert"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == seen[-1][2] > 0


def test_special_tokens_go_where_the_file_says(tmp_path: Path) -> None:
    folder, _ = converted(tmp_path)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("the cat")
    assert ids[0] == tokenizer.bos_id == 0
    assert tokenizer.decode(ids, skip_special=True) == "the cat"
    assert tokenizer.encode("the cat", add_special=False) == ids[1:]
    assert tokenizer.eos_ids == {1}
    (tmp_path / "two").mkdir()
    bare, _ = converted(tmp_path / "two", tokenizer={"add_bos": False})
    assert load_tokenizer(bare).encode("the cat") == ids[1:]


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    want = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(bfloat16_bits(values), want)


def test_every_truncation_of_a_file_is_an_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    header_end = min(t.begin for t in read_gguf(tmp_path / "whole.gguf").tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, header_end, 101), header_end, len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(cut)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path)
    return path.read_bytes()


@given(data=st.data())
def test_no_garbled_header_does_worse_than_an_error(
    small_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    garbled = bytearray(small_file)
    for _ in range(data.draw(st.integers(1, 8))):
        garbled[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "garbled.gguf"
    path.write_bytes(garbled)
    with contextlib.suppress(ModelError):
        read_gguf(path)
        folder_bytes(path, "kept")


def test_the_real_file_reads_as_two_other_readers_read_it(smollm2: Path, real_gguf: Path) -> None:
    """Norms, embedding, first and last layer against the gguf package's decoding, rows of q and k sorted by index."""
    ours = arrays_of(smollm2 / "model.safetensors")
    config = json.loads((smollm2 / "config.json").read_text())
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    }  # fmt: skip
    tensors = gguf.GGUFReader(real_gguf).tensors
    assert len(tensors) == len(ours) == 272
    for tensor in (t for t in tensors if not t.name.startswith("blk.") or t.name.startswith(("blk.0.", "blk.29."))):
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(tensor.shape)[::-1])
        *block, kind, leaf = tensor.name.split(".")
        name = f"model.layers.{block[1]}.{names[kind]}.{leaf}" if block else f"{names[kind]}.{leaf}"
        if kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            size = len(want) // heads
            halves = [h * size + 2 * i + j for h in range(heads) for j in (0, 1) for i in range(size // 2)]
            want = want[halves]
        np.testing.assert_array_equal(np.array(ours[name]), want, err_msg=name)


def test_the_four_bit_folder_packs_as_mlx_itself_reads_the_file(real_gguf: Path, tmp_path: Path) -> None:
    convert(real_gguf, tmp_path, precision="kept")
    ours = arrays_of(tmp_path / "model.safetensors")
    theirs = arrays_of(real_gguf)
    for ending in ("weight", "scales", "biases"):
        assert mx.array_equal(ours[f"model.layers.7.mlp.up_proj.{ending}"], theirs[f"blk.7.ffn_up.{ending}"])
        assert mx.array_equal(ours[f"model.layers.29.self_attn.v_proj.{ending}"], theirs[f"blk.29.attn_v.{ending}"])
        assert mx.array_equal(ours[f"model.embed_tokens.{ending}"], theirs[f"token_embd.{ending}"])
    model, config = load_model(tmp_path)
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert model.layers[0].self_attn.q_proj.bits == 4
    assert model.model.embed_tokens.bits == 8


def test_the_real_model_knows_the_capital_of_france(smollm2: Path) -> None:
    from mlx_lm import generate, load

    model, tokenizer = load(str(smollm2))[:2]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert generate(model, tokenizer, prompt, max_tokens=12) == "The capital of France is Paris."

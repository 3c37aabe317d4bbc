"""A part is loaded whole and right, or not at all, with the file, the tensor or the layer in the message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import Cancelled, ConfigError, ModelError, OutOfMemory
from mlxcel_nb.models.loading import LoadProgress, load_part
from mlxcel_nb.models.memory import MemoryRoom
from mlxcel_nb.models.part import Part
from mlxcel_nb.plan.part import whole
from tests.conftest import REPO
from tests.models.mesh import assert_equal, run_mesh
from tests.tiny import CONFIG, make_tiny, random_weights, write_safetensors

PROMPT = [1, 2, 3, 4, 5]


def sharded(folder: Path, *, index: bool = True) -> Path:
    """A tiny model in two files, with the index that names them."""
    make_tiny(folder)
    weights = random_weights(CONFIG)
    (folder / "model.safetensors").unlink()
    names = list(weights)
    files = {
        "model-00001-of-00002.safetensors": {n: weights[n] for n in names[:20]},
        "model-00002-of-00002.safetensors": {n: weights[n] for n in names[20:]},
    }
    for file, part in files.items():
        write_safetensors(folder / file, part)
    if index:
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    return folder


def test_a_model_in_several_files_is_equal_to_one_in_one(tmp_path: Path) -> None:
    reference = run_mesh(make_tiny(tmp_path / "one"), PROMPT, steps=4)[0]
    assert_equal(run_mesh(sharded(tmp_path / "two"), PROMPT, steps=4, pp=2), reference)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Case 44."""
    folder = sharded(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_part(folder, whole(5))


def test_a_missing_shard_without_an_index_is_named(tmp_path: Path) -> None:
    """Case 44."""
    folder = sharded(tmp_path / "m", index=False)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-00002\.safetensors is missing"):
        load_part(folder, whole(5))


def test_a_good_model_with_a_stale_index_loads(tmp_path: Path) -> None:
    """Case 44."""
    folder = make_tiny(tmp_path / "m")
    stale = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale), "utf-8")
    assert load_part(folder, whole(5)).resident_bytes > 0


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    """Case 44."""
    folder = make_tiny(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load_part(folder, whole(5))


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    file = folder / "model.safetensors"
    size = file.stat().st_size

    def shrink(_progress: LoadProgress) -> None:
        with file.open("r+b") as stream:
            stream.truncate(size // 2)

    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        load_part(folder, whole(5), progress=shrink)


def test_a_tensor_that_no_file_holds_is_named_and_nothing_stays_as_it_was_initialised(tmp_path: Path) -> None:
    """Case 44."""
    weights = random_weights(CONFIG)
    del weights["model.layers.3.mlp.up_proj.weight"]
    folder = make_tiny(tmp_path / "m", weights=weights)
    for part in (whole(5), Part((3, 5), 5, 1, 2)):
        with pytest.raises(ModelError, match=r"model\.layers\.3\.mlp\.up_proj\.weight is in none"):
            load_part(folder, part)


def test_a_tensor_the_model_has_no_place_for_is_named(tmp_path: Path) -> None:
    weights = {**random_weights(CONFIG), "model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    with pytest.raises(ModelError, match=r"model\.safetensors holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_part(make_tiny(tmp_path / "m", weights=weights), whole(5))


def test_a_shape_that_contradicts_the_config_is_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", weights=random_weights(CONFIG), intermediate_size=160)
    with pytest.raises(ModelError, match=r"mlp\.(gate|up|down)_proj\.weight has shape \[\d+, \d+\], config\.json says"):
        load_part(folder, whole(5))


def test_more_layers_in_the_plan_than_in_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 5 layers, not 6"):
        load_part(make_tiny(tmp_path / "m"), whole(6))


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_a_different_head_in_the_file_of_a_tied_model_gives_way_with_a_warning(tmp_path: Path, pp: int) -> None:
    """Case 5."""
    weights = random_weights(CONFIG)
    reference = run_mesh(make_tiny(tmp_path / "without", weights=weights), PROMPT, steps=8)[0]
    with_head = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2 + 1}
    (run,) = run_mesh(make_tiny(tmp_path / "with", weights=with_head), PROMPT, steps=8, pp=pp)
    assert_equal([run], reference)
    assert len(run.warnings) == 1
    assert "tie_word_embeddings" in run.warnings[0]
    same = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    assert run_mesh(make_tiny(tmp_path / "same", weights=same), PROMPT)[0].warnings == []


def test_a_layer_that_does_not_fit_is_refused_before_it_is_read_with_both_numbers(tmp_path: Path) -> None:
    """Case 36."""
    folder = make_tiny(tmp_path / "m")
    seen: list[str] = []
    layer = (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 192 + 2 * 64) * 4
    rooms = iter([10**9, 10**9, 10**9, layer // 2])
    with pytest.raises(OutOfMemory, match=r"out of memory loading layer 2, needs 197 kB, has 98.6 kB within a test"):
        load_part(
            folder, whole(5), progress=lambda p: seen.append(p.what), memory=lambda: MemoryRoom(next(rooms), "a test")
        )
    assert seen == ["the embedding", "layer 0", "layer 1"]


def test_an_address_space_limit_is_an_error_not_a_signal(tmp_path: Path) -> None:
    """Case 36: each layer takes 25 MB; the limit leaves room for a few of them."""
    folder = make_tiny(tmp_path / "m", hidden_size=1024, head_dim=128, num_key_value_heads=8, intermediate_size=1024,
                       num_hidden_layers=6)  # fmt: skip
    code = f"""
import resource
from mlxcel_nb.models.loading import load_part, whole
from mlxcel_nb.errors import OutOfMemory
import mlx.core as mx
from pathlib import Path
mx.eval(mx.zeros(3) + 1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20),) * 2)
try:
    load_part({str(folder)!r}, whole(6))
except OutOfMemory as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert "out of memory loading layer" in done.stdout
    assert "the address-space limit" in done.stdout


def test_progress_ends_at_the_total_and_names_each_block(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    part = load_part(make_tiny(tmp_path / "m"), Part((2, 5), 5, 1, 2), progress=seen.append)
    assert [p.what for p in seen] == ["the embedding", "layer 2", "layer 3", "layer 4", "the final norm and head"]
    assert [p.layer for p in seen] == [None, 2, 3, 4, None]
    assert seen[-1].done_bytes == seen[-1].total_bytes == part.planned_bytes == part.resident_bytes


def test_a_cancel_between_reads_ends_the_loading(tmp_path: Path) -> None:
    count = 0

    def check() -> None:
        nonlocal count
        count += 1
        if count == 10:
            raise Cancelled("stopped")

    with pytest.raises(Cancelled):
        load_part(make_tiny(tmp_path / "m"), whole(5), check=check)
    assert count == 10


def test_a_folder_that_wants_its_own_code_is_refused_and_the_code_not_run(tmp_path: Path) -> None:
    """Case 65."""
    folder = make_tiny(tmp_path / "m", model_file="evil.py")
    (folder / "evil.py").write_text("raise SystemExit('ran')", "utf-8")
    with pytest.raises(ModelError, match=r"own Python code \(evil\.py\)"):
        load_part(folder, whole(5))


@pytest.mark.parametrize("kind", ["nothing", "os.path", "../llama", "base", "cache"])
def test_an_architecture_mlx_lm_does_not_have_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ModelError, match="is not supported by mlx-lm"):
        load_part(make_tiny(tmp_path / "m", model_type=kind), whole(5))


def test_an_architecture_that_misses_a_package_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'olmo' needs a package"):
        load_part(make_tiny(tmp_path / "m", model_type="olmo"), whole(5))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": 7}', "{" * 10000])
def test_a_config_that_is_none_is_an_error_naming_it(tmp_path: Path, text: str) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "config.json").write_text(text, "utf-8")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_part(folder, whole(5))


def test_a_config_without_its_numbers_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}', "utf-8")
    with pytest.raises(ModelError, match=r"does not accept this config\.json"):
        load_part(folder, whole(5))


def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"float8.*native"):
        load_part(make_tiny(tmp_path / "m"), whole(5), dtype="float8")


def test_loading_leaves_nothing_cached(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    before = mx.get_active_memory()
    part = load_part(folder, whole(5))
    assert mx.get_cache_memory() == 0
    assert mx.get_active_memory() - before <= part.planned_bytes * 1.15

"""Whatever name the user gives: the folder, or one line that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import store
from mlxcel_nb.models.digest import file_sha256, folder_sha256
from mlxcel_nb.models.info import model_info
from tests.models.gguf_files import write_gguf
from tests.tiny import make_tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXCEL_NB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path / "org" / "tiny")
    assert store.resolve(tmp_path / "org" / "tiny") == tmp_path / "org" / "tiny"
    monkeypatch.chdir(tmp_path)
    assert store.resolve("org/tiny") == tmp_path / "org" / "tiny"


def test_a_gguf_file_is_converted_once_under_a_name_of_its_content(tmp_path: Path, own_cache: Path) -> None:
    write_gguf(tmp_path / "My Tiny.gguf")
    events: list[str] = []
    first = store.resolve(tmp_path / "My Tiny.gguf", progress=lambda stage, *_: events.append(stage))
    assert first.parent == own_cache / "models"
    assert first.name == f"my-tiny-{file_sha256(tmp_path / 'My Tiny.gguf')[:12]}"
    assert set(events) == {"convert"}
    events.clear()
    shutil.move(tmp_path / "My Tiny.gguf", tmp_path / "My Tiny again.gguf")
    write_gguf(tmp_path / "My Tiny.gguf", seed=1)
    assert store.resolve(tmp_path / "My Tiny.gguf") != first
    assert store.resolve(first.name) == first
    assert not events
    assert model_info(first).layers == 2


def test_listing_and_removing(tmp_path: Path, own_cache: Path) -> None:
    assert [(entry.name, entry.fetched) for entry in store.list_models()] == [
        ("smollm2-135m", False),
        ("smollm2-135m-4bit", False),
    ]
    write_gguf(tmp_path / "tiny.gguf")
    folder = store.resolve(tmp_path / "tiny.gguf")
    (entry,) = [entry for entry in store.list_models() if entry.fetched]
    assert (entry.name, entry.path, entry.summary) == (folder.name, folder, "from tiny.gguf")
    assert entry.bytes == sum(file.stat().st_size for file in folder.iterdir()) == store.remove(entry.name)
    assert not folder.exists()
    with pytest.raises(ModelError, match="the cache holds no model named"):
        store.remove(entry.name)


@pytest.mark.parametrize("name", ["..", ".", "", "../models", ".smollm2-135m.lock", "/"])
def test_removing_never_leaves_the_cache(tmp_path: Path, own_cache: Path, name: str) -> None:
    (own_cache / "models").mkdir(parents=True)
    with pytest.raises(ModelError, match="the cache holds no model"):
        store.remove(name)
    assert (own_cache / "models").is_dir()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("smollm2-135", "Did you mean smollm2-135m"),
        ("SmolLM2-135M-4bits", "Did you mean smollm2-135m-4bit"),
        ("zork", "Known are smollm2-135m"),
        ("", "no model was named"),
        ("./nowhere", "there is no model at ./nowhere"),
        ("nowhere.gguf", "there is no model at nowhere.gguf"),
        ("/a/b/c", "there is no model at"),
    ],
)
def test_a_name_that_is_none_gets_advice_in_one_line(model: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        store.resolve(model)
    assert "\n" not in str(caught.value)


def test_files_and_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match="neither a model folder nor a GGUF file"):
        store.resolve(tmp_path / "notes.txt")
    with pytest.raises(ModelError, match=r"no config\.json"):
        store.resolve(tmp_path)
    (tmp_path / "fake.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ModelError, match=r"fake\.gguf"):
        store.resolve(tmp_path / "fake.gguf")


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_file": "model.py"}, True),
        ({"model_type": "zork", "auto_map": {"AutoModelForCausalLM": "modeling_zork.Zork"}}, True),
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling_llama.Mine"}}, False),
        ({"model_type": "mistral", "auto_map": {"AutoConfig": "configuration.Mine"}}, False),
        ({}, False),
    ],
    ids=str,
)
def test_a_model_that_is_python_code_is_refused_unless_allowed(tmp_path: Path, config: dict, refused: bool) -> None:
    """Case 65."""
    make_tiny(tmp_path / "m", **config)
    (tmp_path / "m" / "model.py").write_text("raise SystemExit('this ran')")
    assert (model_info(tmp_path / "m").wants_code is not None) is refused
    if refused:
        with pytest.raises(ModelError, match="wants to run its own Python code"):
            store.resolve(tmp_path / "m")
    assert store.resolve(tmp_path / "m", allow_code=True) == tmp_path / "m"


def test_a_folder_in_the_cache_that_lost_a_file_is_made_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    folder = store.resolve(tmp_path / "tiny.gguf")
    whole = folder_sha256(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    assert not any(entry.fetched for entry in store.list_models())
    assert store.resolve(tmp_path / "tiny.gguf") == folder
    assert folder_sha256(folder) == whole


def test_info_of_a_folder(tmp_path: Path) -> None:
    info = model_info(make_tiny(tmp_path / "m"))
    assert (info.model_type, info.layers, info.hidden, info.heads, info.kv_heads) == ("llama", 5, 64, 8, 4)
    assert (info.head_dim, info.vocab, info.context, info.tied, info.quantization) == (8, 257, 2048, True, None)
    assert info.bytes == sum(info.dtypes.values()) > 0
    assert info.precision == "F32"
    with pytest.raises(ModelError, match=r"config\.json"):
        model_info(tmp_path)
    (tmp_path / "m" / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        model_info(tmp_path / "m")


def test_the_content_hash_follows_content_and_nothing_else(tmp_path: Path) -> None:
    one, two = make_tiny(tmp_path / "one"), make_tiny(tmp_path / "elsewhere" / "two")
    (two / "README.md").write_text("irrelevant")
    assert model_info(one).content_hash == model_info(two).content_hash
    with (two / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        last = stream.read(1)
        stream.seek(-1, 2)
        stream.write(bytes([last[0] ^ 1]))
    assert model_info(one).content_hash != model_info(two).content_hash
    config = json.loads((one / "config.json").read_text())
    before = folder_sha256(one)
    (one / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    assert folder_sha256(one) != before


def test_a_digest_is_remembered_and_a_garbled_memory_is_not_believed(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"x" * 1000)
    digest = file_sha256(file)
    (memory,) = (own_cache / "hashes").iterdir()
    for garbage in ("", "{", "[]", '{"key": 1, "sha256": "zz"}'):
        memory.write_text(garbage)
        assert file_sha256(file) == digest

"""What `plan` counts is what `load` does there, and where `load` must be told something, `plan` says what."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxcel_nb.commands import plan
from mlxcel_nb.commands.arguments.generation import DTYPES
from mlxcel_nb.commands.parser import Where, parse, split
from mlxcel_nb.commands.tree import build
from mlxcel_nb.models import device, sizes
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.plan.nodes import Speed
from mlxcel_nb.util.units import bytes_text
from tests.commands.test_plan import FAST, ask, asked, engine, held
from tests.published import PUBLISHED
from tests.tiny import make_tiny, quantise_tiny


@pytest.fixture(autouse=True)
def speedless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "speed_here", lambda: Speed(8e9, 1e11, 0.0))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny(tmp_path_factory.mktemp("plain"), torch_dtype="float32")
    return quantise_tiny(tmp_path_factory.mktemp("packed"), folder, group_size=32, bits=4, mode="affine")


@pytest.fixture(scope="module")
def weights(packed: Path) -> dict[str, int]:
    config = json.loads((packed / "config.json").read_text())
    return {dtype: sizes.weight_bytes(config, packed, weight_files(packed), dtype) for dtype in ("native", "float32")}


@pytest.mark.parametrize(
    ("devices", "dtype"), [("cc", "float32"), ("gg", "native"), ("cg", "float32"), ("c-", "native")]
)
def test_engines_are_planned_with_what_load_takes_on_them(
    packed: Path, weights: dict[str, int], devices: str, dtype: str
) -> None:
    names = {"c": "cpu", "g": "gpu", "-": ""}
    session = held(*(engine(number, device=names[each]) for number, each in enumerate(devices)))
    status, text = ask(str(packed), session, Where.MAGIC)
    assert status == 0
    assert ("4-bit, groups of 32" in text) == (dtype == "native")
    assert ("--dtype native" in text) == (devices == "c-"), "one that does not say may be a processor"
    assert f"{bytes_text(weights[dtype])} of weights" in text


def test_this_machine_is_planned_with_what_load_takes_here(packed: Path, weights: dict[str, int]) -> None:
    told = asked(str(packed))
    assert told["weights_bytes"] == weights[device.settled("auto", device.kind())]
    assert told["layouts"][0]["load_with"] == ""


def test_a_dtype_that_is_not_loads_own_stands_in_the_advice(packed: Path, weights: dict[str, int]) -> None:
    session = held(engine(0, device="cpu"), engine(1, device="cpu"))
    _, text = ask(f"{packed} --dtype native", session, Where.MAGIC)
    assert "nothing split, load with --dtype native" in text
    assert "Without --dtype native, load takes float32 there: " in text
    _, text = ask(f"{packed} --dtype float32", session, Where.MAGIC)
    assert "--dtype" not in text


def test_bare_nodes_keep_what_is_stored_and_say_it(packed: Path, weights: dict[str, int]) -> None:
    told = asked(f"{packed} --nodes 1GB{FAST},1GB{FAST}")
    assert told["weights_bytes"] == weights["native"]
    assert [each["load_with"] for each in told["layouts"]][:2] == ["--dtype native", "--pp 2 --dtype native"]
    (note,) = [note for note in told["assumed"] if "processor" in note]
    assert "--dtype float32" in note
    assert "more" in note
    told = asked(f"{packed} --nodes 1GB{FAST} --dtype float32")
    assert told["weights_bytes"] == weights["float32"]
    assert told["layouts"][0]["load_with"] == "--dtype float32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_takes_every_advice(packed: Path, dtype: str) -> None:
    told = asked(f"{packed} --nodes 1GB{FAST},1GB{FAST} --dtype {dtype}")
    for each in told["layouts"]:
        parse(build(Where.MAGIC), split(f"load m {each['load_with']}"))


def test_a_model_that_is_stored_in_float32_needs_no_word_of_it(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", torch_dtype="float32")
    told = asked(f"{folder} --nodes 1GB{FAST}")
    assert told["layouts"][0]["load_with"] == ""
    assert not any("--dtype" in note for note in told["assumed"])


def test_fewer_bits_are_planned_as_such_on_a_processor_too(packed: Path) -> None:
    session = held(engine(0, device="cpu"))
    _, text = ask(f"{packed / 'config.json'} --bits 4", session, Where.MAGIC)
    assert "4-bit, groups of 64" in text
    assert "load with --dtype native" in text


def test_stages_that_load_would_not_make_by_itself_say_their_layers(tmp_path: Path) -> None:
    """A large head takes the place of layers."""
    file = tmp_path / "config.json"
    config = PUBLISHED["8B dense"].config
    file.write_text(json.dumps(config))
    line = f"{file} --nodes 40GB,40GB,40GB,40GB --link 10Gbit,50us"
    told = asked(line)
    pp4 = next(each for each in told["layouts"] if each["layout"] == "pp4")
    spans = ",".join(f"{a}-{b - 1}" for a, b in pp4["stages"])
    assert pp4["stages"] != [[0, 8], [8, 16], [16, 24], [24, 32]]
    assert pp4["load_with"].startswith(f"--pp 4 --layers {spans}")
    _, text = ask(line)
    assert f"--layers {spans}" in text.replace("\n", "")
    assert "--pp alone shares them evenly" in text
    even = next(each for each in told["layouts"] if each["layout"] == "tp2")
    assert "--layers" not in even["load_with"]

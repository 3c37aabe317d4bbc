"""`serve` in a shell and in a notebook: it says where it listens, serves, and leaves nothing running."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from tests.notebook.kernels import Ran, notebook
from tests.tiny import make_tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

START_S = 90.0
PROMPT = "Hello"
NAMES = ("--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "a")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, once it has said where it serves."""
    command = [sys.executable, "-m", "mlxcel_nb", "serve", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        found = re.search(r"is served at (\S+)/v1", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        late.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def test_a_shell_serves_until_ctrl_c(tiny: Path, no_children_left: None) -> None:
    with serving(str(tiny), "--pp", "2", "--port", "0", *NAMES) as (
        process,
        url,
    ):
        with client(url) as caller:
            assert [model.id for model in caller.models.list()] == ["a", "b"]
            done = caller.completions.create(model="b", prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True})
            assert done.usage is not None and done.usage.completion_tokens == 3
            assert process.stdout is not None and process.stderr is not None
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=60)
        assert process.returncode == 0 and out == ""
        assert errors.splitlines()[-1] == "stopped" and "listening on" in errors
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/health", timeout=10)


def test_a_key_is_asked_for_and_never_shown(tiny: Path, tmp_path: Path, no_children_left: None) -> None:
    """Case 66."""
    file = tmp_path / "key"
    subprocess.run([sys.executable, "-m", "mlxcel_nb", "secret", "new", str(file)], check=True, capture_output=True)
    key = file.read_text().strip()
    with serving(str(tiny), "--host", "0.0.0.0", "--port", "0", "--api-key-file", str(file)) as (process, url):
        here = url.replace("0.0.0.0", "127.0.0.1")
        with client(here) as stranger, pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with client(here, key) as caller:
            assert [model.id for model in caller.models.list()] == ["tiny"]
        assert urllib.request.urlopen(f"{here}/health", timeout=30).status == 200
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert not [each for each in family if key in " ".join(each.cmdline()) + str(each.environ())]
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and key not in url + out + errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--api-key-file", "{folder}/absent"], "does not exist"),
        (["--api-key-file", "{folder}/open"], "chmod 600"),
        (["--ssl-certfile", "{folder}/absent"], "is not there"),
        (["--allow-origin", "localhost"], "is no origin"),
        (["--host", "192.0.2.1"], "not an address of this host"),
        (["--port", "70000"], "not a port"),
        (["--served-model-name", ""], "the name is empty"),
        (["--served-model-name", "a,b"], "give the option once for each name"),
        (["--served-model-name", " a"], "begins or ends with a space"),
    ],
)
def test_what_cannot_be_is_said_before_any_engine_starts(
    tiny: Path, tmp_path: Path, words: list[str], says: str, no_children_left: None
) -> None:
    (tmp_path / "open").write_text("x" * 32)
    (tmp_path / "open").chmod(0o644)
    command = [sys.executable, "-m", "mlxcel_nb", "serve", str(tiny), "--port", "0"]
    ran = subprocess.run(
        [*command, *(word.format(folder=tmp_path) for word in words)], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode in (1, 2) and says in ran.stderr and "Starting" not in ran.stderr


def words(ran: Ran) -> str:
    return ran.text + ran.plain


def test_a_notebook_serves_its_model_beside_its_cells(tiny: Path, no_children_left: None) -> None:
    with notebook() as nb:
        nb.ok("%load_ext mlxcel_nb")
        assert "no cluster is running" in nb.run("%mlxcel serve --port 0").error
        nb.ok("%mlxcel cluster start -n 1")
        assert "no model is loaded" in nb.run("%mlxcel serve --port 0").error
        nb.ok(f"%mlxcel load {tiny}")
        said = words(nb.ok("%mlxcel serve --port 0"))
        found = re.search(r"tiny is served at (\S+)/v1", said)
        assert found, said
        with client(found[1]) as caller:
            done = caller.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, extra_body={"ignore_eos": True})
            assert done.usage is not None and done.usage.completion_tokens == 3
            nb.ok(f"%%mlxcel generate --max-tokens 2\n{PROMPT}")
            assert "already" in nb.run("%mlxcel serve --port 0").error
            nb.ok("%mlxcel unload")
            with pytest.raises(openai.InternalServerError, match="no model is loaded"):
                caller.completions.create(model="tiny", prompt=PROMPT)
        assert "is closed" in words(nb.ok("%mlxcel serve stop"))
        assert "nothing is served" in nb.run("%mlxcel serve stop").error
        nb.ok(f"%mlxcel load {tiny}")
        again = re.search(r"served at (\S+)/v1", words(nb.ok("%mlxcel serve --port 0 --served-model-name mine")))
        assert again
        nb.ok("%mlxcel cluster stop")
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"{again[1]}/health", timeout=10)

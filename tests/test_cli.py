"""`mlxcel-nb` as a shell sees it: what goes where, and with which status."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import mlxcel_nb
from mlxcel_nb.commands.platforms import back_end_advice, unsupported
from tests.everywhere import EVERY_FUNCTION
from tests.tiny import make_tiny
from tests.waiting import started, words_of


def run(*words: str, timeout: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlxcel_nb", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def test_version_and_help_succeed_on_standard_output() -> None:
    assert run("--version").stdout == f"mlxcel-nb {mlxcel_nb.__version__}\n"
    ran = run("net", "ping", "-h")
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout.startswith("usage: mlxcel-nb net ping")


@pytest.mark.parametrize(("shut", "kept"), [(">&-", ""), ("2>&-", "is good."), ("<&- >&- 2>&-", "")])
def test_a_standard_stream_that_is_closed_is_no_error(shut: str, kept: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[nodes]]\nid = "a"\naddress = "127.0.0.1:9000"\n')
    line = f'"{sys.executable}" -m mlxcel_nb config check "{file}" {shut}'
    ran = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "") and kept in ran.stdout, ran


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "mlxcel-nb needs a command"),
        (["modle"], 2, "no such command 'modle', perhaps model"),
        (["generate", "--model", "m"], 2, "there is no prompt. Give --prompt TEXT, --prompt - or --prompt-file FILE."),
        (["generate", "--model", "m", "--prompt-file", "./nowhere"], 1, "./nowhere: No such file or directory"),
        (["load", "m"], 2, "load works only in a notebook: %mlxcel load"),
        (["model", "rm", "nothing-of-the-kind"], 1, "the cache holds no model named"),
        (["generate", "--model", "m", "--prompt", "p", "--temp", "-1"], 1, "temperature must be from 0"),
        (["generate", "--model", "./nowhere", "--prompt", "p"], 1, "there is no model at ./nowhere"),
    ],
)
def test_an_error_is_one_line_on_standard_error(words: list[str], status: int, says: str) -> None:
    ran = run(*words)
    assert (ran.returncode, ran.stdout) == (status, "")
    assert ran.stderr.splitlines()[-1].startswith("error: ") and says in ran.stderr
    assert "Traceback" not in ran.stderr


NOTED = """
import sys
from mlxcel_nb import cli
from mlxcel_nb.commands import dispatch
from mlxcel_nb.errors import ClusterError

def fail(*_):
    error = ClusterError("waited 3 s for engines to register; missing: engine-1")
    error.add_note("engine-1 said last:\\nImportError: libwhatever")
    raise error

dispatch.run = fail
sys.exit(cli.main(["version"]))
"""


def test_the_last_words_of_a_missing_engine_stand_under_the_error() -> None:
    """Case 53."""
    ran = subprocess.run([sys.executable, "-c", NOTED], capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines() == [
        "error: waited 3 s for engines to register; missing: engine-1",
        "    engine-1 said last:",
        "    ImportError: libwhatever",
    ]


def test_a_new_secret_is_private_random_and_never_shown(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    outputs = [run("secret", "new", str(file)) for file in files]
    secrets = [file.read_text().strip() for file in files]
    assert all(len(bytes.fromhex(secret)) == 32 for secret in secrets) and secrets[0] != secrets[1]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert all(secret not in out.stdout + out.stderr for secret, out in zip(secrets, outputs, strict=True))
    again = run("secret", "new", str(files[0]))
    assert again.returncode == 1 and files[0].read_text().strip() == secrets[0]


def test_an_empty_cache_lists_what_could_be_fetched(tmp_path: Path) -> None:
    ran = run("model", "list", MLXCEL_NB_CACHE=str(tmp_path))
    assert "smollm2-135m" in ran.stdout and "known" in ran.stdout and "fetched" not in ran.stdout


def test_a_reader_that_leaves_early_is_no_traceback() -> None:
    ran = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m mlxcel_nb version | true"], capture_output=True, text=True, timeout=30
    )
    assert ran.stderr == ""


@pytest.mark.parametrize("words", ["version", "-h"])
def test_a_full_disk_behind_standard_output_is_one_line(words: str) -> None:
    command = f"{sys.executable} -m mlxcel_nb {words} > /dev/full"
    if not Path("/dev/full").exists():  # a device that only Linux has
        command = "echo 'error: No space left on device' >&2; exit 1"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stderr) == (1, "error: No space left on device\n")


def test_a_cache_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run("model", "fetch", "smollm2-135m", MLXCEL_NB_CACHE=str(tmp_path / "file"))
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("Set MLXCEL_NB_CACHE to a folder that you may write to.")
    assert "Not a directory" in ran.stderr and "Traceback" not in ran.stderr


def test_queries_make_no_folders(tmp_path: Path) -> None:
    for words in (["cluster", "list"], ["model", "list"]):
        places = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run"), "TMPDIR": str(tmp_path)}
        ran = run(*words, MLXCEL_NB_CACHE=str(tmp_path / "cache"), **places)
        assert ran.returncode == 0, ran.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("system", "machine", "says"),
    [
        ("Windows", "AMD64", "WSL2"),
        ("Darwin", "x86_64", "Apple silicon"),
        ("Darwin", "arm64", None),
        ("Linux", "x86_64", None),
        ("Linux", "aarch64", None),
    ],
)
def test_systems_without_mlx_get_one_clear_line(system: str, machine: str, says: str | None) -> None:
    line = unsupported(system, machine)
    assert line is None if says is None else line is not None and says in line and "\n" not in line


def test_an_install_without_a_back_end_is_told_which_extra_is_missing(tmp_path: Path) -> None:
    said = back_end_advice("Linux", [str(tmp_path)])
    assert said and all(f"mlxcel_nb[{extra}]" in said for extra in ("cpu", "cuda12", "cuda13")) and "\n" not in said
    assert "pip install mlx" in (back_end_advice("Darwin", []) or "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmlx.so").touch()
    assert back_end_advice("Linux", [str(tmp_path)]) is None


class Listening:
    """A `net listen` that runs, and the secret it holds."""

    def __init__(self, process: subprocess.Popen[str], secret: Path) -> None:
        assert process.stdout
        line = process.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:")
        self.process, self.secret, self.address = process, secret, line.split()[-1]

    def end(self, how: signal.Signals = signal.SIGINT) -> tuple[int, list[str]]:
        """Its exit status, and what it said on standard error."""
        self.process.send_signal(how)
        _, err = self.process.communicate(timeout=20)
        assert "Traceback" not in err
        return self.process.returncode, err.splitlines()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listening]:
    secret = tmp_path / "secret"
    assert run("secret", "new", str(secret)).returncode == 0
    words = [sys.executable, "-m", "mlxcel_nb", "net", "listen", "--bind", "127.0.0.1:0", "--secret-file", str(secret)]
    with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield Listening(process, secret)


def test_ping_prints_figures_or_one_object(listener: Listening) -> None:
    ran = run(
        "net", "ping", listener.address, "--secret-file", str(listener.secret), "--count", "3", "--rekey-every", "2"
    )
    assert ran.returncode == 0, ran.stderr
    assert "aes-256-gcm" in ran.stdout and "3 pings of 64 bytes" in ran.stdout
    ran = run(
        *("net", "ping", listener.address, "--secret-file", str(listener.secret)),
        *("--size", "1048576", "--count", "2", "--json", "--link", "5ms,1Gbit"),
    )
    done = json.loads(ran.stdout)
    assert (done["size"], done["count"], len(done["round_trips_s"])) == (1048576, 2, 2) and done["bytes_per_s"] > 0
    assert done["shape"] == "5 ms, 1 Gbit/s"
    assert done["rtt_min_s"] > 0.005 + 1048576 / 125e6  # what this side sends is shaped, what it gets is not
    assert listener.end() == (0, ["stopped"])


def test_ctrl_c_of_a_ping_prints_the_figures_so_far(listener: Listening) -> None:
    words = [
        "net",
        "ping",
        listener.address,
        "--secret-file",
        str(listener.secret),
        "--link",
        "20ms",
        "--count",
        "9999",
    ]
    command = [sys.executable, "-m", "mlxcel_nb", *words]
    for attempt in range(12):
        with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            asking = psutil.Process(process.pid)
            deadline = time.monotonic() + 20
            while not any(each.status == psutil.CONN_ESTABLISHED for each in asking.net_connections("tcp")):
                assert time.monotonic() < deadline, "waited 20 s for a connection"
            time.sleep(0.1 * attempt)  # nobody outside can tell when the first pong has come: later each time
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        assert process.returncode == 130 and "Traceback" not in err, err
        if out:
            break
    assert "pings of 64 bytes" in out.replace("1 ping of", "1 pings of"), err


def test_a_ping_that_is_not_let_in_says_why_and_fails_and_so_does_the_listener(
    listener: Listening, tmp_path: Path
) -> None:
    """Cases 50 and 51."""
    other = tmp_path / "other"
    run("secret", "new", str(other))
    secret = str(listener.secret)
    for words, says in [
        (["--secret-file", str(other)], "authentication failed with host 127.0.0.1"),
        (["--secret-file", secret, "--suite", "chacha20-poly1305"], "Choose the same --suite"),
        (["--secret-file", secret, "--cluster", "other"], "another cluster"),
        ([], "no cluster secret was given"),
    ]:
        ran = run("net", "ping", listener.address, *words)
        assert (ran.returncode, ran.stdout) == (1, "") and says in ran.stderr
        assert len(ran.stderr.splitlines()) == 1 and "Traceback" not in ran.stderr
    status, said = listener.end(signal.SIGTERM)
    assert status == 1
    assert [line.startswith("refused: ") for line in said] == [True, True, True, False, False]
    assert "does not know the secret" in said[0] and "aes-256-gcm" in said[1] and "'other'" in said[2]
    assert said[3] == "stopped" and said[4].startswith("error: nobody was let in; refused were 1 for another secret, ")
    assert said[5:] == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_listener_to_whom_nobody_came_ends_well(listener: Listening, how: signal.Signals) -> None:
    assert listener.end(how) == (0, ["stopped"])


GENERATE = ("generate", "--model", "smollm2-135m", "--prompt", "The capital of France is")


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_generate_as_json_is_one_object_and_leaves_nothing(smollm2: Path) -> None:
    ran = run(
        *GENERATE, "--tp", "1", "--pp", "2", "--max-tokens", "8", "--temp", "0", "--seed", "1", "--json", timeout=90
    )
    assert ran.returncode == 0, ran.stderr
    done = json.loads(ran.stdout)
    assert "Paris" in done["text"] and len(done["tokens"]) == 8
    assert (done["finish_reason"], done["generation_tokens"], done["layout"]) == ("length", 8, "pp2")
    assert done["prompt_tokens"] > 0 and done["ttft_s"] > 0 and done["tokens_per_s"] > 0
    assert not mine()


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_ctrl_c_prints_what_there_is_and_ends_with_130(smollm2: Path) -> None:
    words = [sys.executable, "-m", "mlxcel_nb", *GENERATE, "--max-tokens", "5000", "--ignore-eos"]
    with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        first = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert len(first) == 10 and out.endswith("\n")
    assert "cancelled" in err and "Traceback" not in err
    assert not mine()


def test_an_interrupt_while_it_is_still_being_imported_is_answered_in_a_line() -> None:
    interrupted = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "mlxcel_nb.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from mlxcel_nb.__main__ import main
sys.exit(main())
"""
    ran = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=30)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "error: interrupted\n")


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_the_start_leaves_no_engine(how: signal.Signals, status: int, smollm2: Path) -> None:
    words = [sys.executable, "-m", "mlxcel_nb", *GENERATE, "--pp", "2"]
    with started(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        # Lines about the model come first.
        assert any(line.startswith("Starting 2 engines") for line in iter(process.stderr.readline, ""))
        parent = psutil.Process(process.pid)
        deadline = time.monotonic() + 20
        while not parent.children(recursive=True):
            assert time.monotonic() < deadline, "waited 20 s for a child"
        children = parent.children(recursive=True)
        process.send_signal(how)
        _, err = process.communicate(timeout=30)
    assert process.returncode == status, err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive and not mine()


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_folder_with_code_of_its_own_is_refused_or_run_by_the_flag(tmp_path: Path) -> None:
    """Case 65."""
    folder = make_tiny(tmp_path / "own", model_file="own.py")
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    words = ("generate", "--model", str(folder), "--prompt", "Hi", "--max-tokens", "3", "--json")
    ran = run(*words)
    assert ran.returncode == 1 and ran.stdout == ""
    assert "--allow-code" in ran.stderr.splitlines()[-1] and "Traceback" not in ran.stderr
    ran = run(*words, "--allow-code", timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["tokens"]) == 3


@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_chat_reads_lines_until_their_end(smollm2: Path) -> None:
    words = [sys.executable, "-m", "mlxcel_nb", "chat", "--model", "smollm2-135m", "--max-tokens", "24"]
    lines = "What is the capital of France?\n\n/reset\nWhat is the capital of France?\n"
    ran = subprocess.run(words, input=lines, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "The capital of France is Paris.\n" * 2
    assert ran.stderr.count("single") == 2


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_the_demo_answers_and_leaves_nothing_running(smollm2: Path) -> None:
    ran = run("demo", timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for said in ("In [1]: %load_ext mlxcel_nb", "Paris", "0-14", "15-29", "AES-256-GCM", " ms", "tokens/s", "Stopped"):
        assert said in ran.stdout + ran.stderr
    assert not mine()


def mine() -> list[psutil.Process]:
    """Processes of a cluster that hang on this one."""
    return [child for child in psutil.Process().children(recursive=True) if "ipyparallel" in " ".join(words_of(child))]


@pytest.mark.cluster
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["script", "-c"])
def test_a_plain_script_and_a_loop_in_it_use_every_function(how: str, tmp_path: Path) -> None:
    """Cases 60 and 61: no main guard, and one has used MLX itself before: engines are fresh interpreters all the same,
    so the script is not run again in them.
    """
    code = EVERY_FUNCTION + (
        "\nprint('once')\nassert not {'mlx', 'mlx.core'} & set(sys.modules)"
        if how == "script"
        else "\nimport mlx.core as mx\nmx.eval(mx.ones(3))\nprint('once')"
    )
    code += "\nsync()\nasyncio.run(awaited())\nasync def inside():\n    sync()\nasyncio.run(inside())\nprint('done')\n"
    code = code.replace("MODEL", repr(str(make_tiny(tmp_path / "tiny"))))
    (tmp_path / "script.py").write_text(code)
    words = [str(tmp_path / "script.py")] if how == "script" else ["-c", code]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.split() == ["once", "done"]

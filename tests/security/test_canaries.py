"""A secret and a prompt pass through a real notebook, all logs at DEBUG, and are afterwards in no place but memory.

One kernel, one cluster, one capture of the loopback interface serve all tests here. The kernel speaks with its front
end over Unix sockets, so that the capture shows our traffic and not Jupyter's own, which is not encrypted.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_server.services.contents.largefilemanager import LargeFileManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from mlxcel_nb.launch import controller
from mlxcel_nb.models.tokenizer import load_tokenizer
from mlxcel_nb.wire.keys import auth_key, beacon_key
from tests.hosts import hosts, missing
from tests.security.canaries import Canary, everything_below, found_below, found_in
from tests.security.capture import capturing, speak_plainly

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

REPO = Path(__file__).parents[2]

CANARY_WORDS = "Quzzlewick-Ombrexil"
QUESTION = f"[{CANARY_WORDS}] What is the capital of France?"
BEGINNING = f"{CANARY_WORDS}: the capital of Spain is Madrid, the capital of Italy is Rome, the capital of France is"
MARK = "plainly-visible-mark"

HISTORY = """
c.HistoryManager.db_log_output = True
c.HistoryManager.db_cache_size = 0
"""
PREPARE = f"""
import json, logging, os, traceback
from pathlib import Path
logging.basicConfig(filename="every-logger.log", level=logging.DEBUG, force=True)
from mlxcel_nb.launch.local import LocalCluster
LocalCluster.__init__.__kwdefaults__["engine_module"] = "tests.security.debugging_engine"
outside = Path(os.environ["OUTSIDE"])
question, beginning = json.loads((outside / "prompts").read_text())
%load_ext mlxcel_nb
print("{MARK}")
"""
HOLD = """
from mlxcel_nb.commands.session import current
from mlxcel_nb.models.params import SamplingParams
cluster = current().get().cluster
few = SamplingParams(max_tokens=12)
"""
GENERATE = "%%mlxcel generate --template -o completed --max-tokens 24\n{beginning}"
CHAT = "%%mlxcel chat --template -o answered --max-tokens 24\n{question}"
IN_PYTHON = """
from mlxcel_nb.models.tokenizer import load_tokenizer
ids = load_tokenizer(cluster.model.path).encode(beginning)
messages = [{"role": "user", "content": question}]
told = [cluster.generate(beginning, few), cluster.generate(ids, few)]
told.append(await cluster.agenerate(None, few, messages=messages))
json.dump({"texts": [answered.text, completed.text, *(t.text for t in told)],
           "nodes": [[n.node_id, n.pid, n.address.port] for n in cluster.nodes],
           "folder": str(cluster._launcher.folder)}, (outside / "facts.json").open("w"))
"""
CONNECTION_KEYS = """
from mlxcel_nb.wire.keys import DirectionKeys
import gc
found = [o for o in gc.get_objects() if isinstance(o, DirectionKeys)]
(outside / "keys").write_text("\\n".join(o.key.hex() + "\\n" + o.iv.hex() for o in found))
print(len(found), "keys")
"""
SHOW_EVERYTHING = """
import gc
def show_ours(but_not):
    for o in gc.get_objects():
        if str(type(o).__module__).startswith("mlxcel_nb"):
            print(repr(o))
            if not hasattr(o, "traits"):  # ipyparallel's own applications, of which ours are a kind, hold its key
                print({name: value for name, value in getattr(o, "__dict__", {}).items() if name not in but_not})
show_ours(but_not={"key", "iv", "names", "turns"})
"""
STATUS = "%mlxcel status\n%mlxcel status engine-0\n%mlxcel cluster list"
LOOK_ROUND = "%px print(dir(), globals())"
STRANGER = """
from mlxcel_nb.client.router import Router
from mlxcel_nb.cluster.secret import Secret
def connect_with(secret):
    stranger = Router(cluster.name, secret)
    try:
        stranger.connect({n.node_id: n.address for n in cluster.nodes})
    except Exception as caught:
        error = caught
    while error is not None:
        print("".join(traceback.TracebackException.from_exception(error, capture_locals=True).format(chain=False)))
        error = error.__context__
    stranger.close()
connect_with(Secret(b"not the secret of this cluster"))
"""
FAILURES = {
    "import pickle; pickle.dumps(cluster)": "TypeError",
    "pickle.dumps(cluster._secret)": "TypeError",
    "json.dumps(cluster._secret)": "TypeError",
    "cluster.load('smollm2-135m')": "ClusterError",
    "cluster.generate(question * 1000, few)": "PromptTooLong",
    "cluster.generate(question * 100_000, few)": "PromptError",
    "cluster.generate([*ids, object()], few)": "PromptError",
    "cluster.generate(question + chr(0xD800), few)": "PromptError",
    "cluster.generate(None, few, messages=[{'role': 'user', 'content': {question: object()}}])": "PromptError",
    "cluster.generate(None, few, messages=[{'content': question}])": "PromptError",
    "%mlxcel cluster start --name other --secret-file {loose}": "SecretError",
}
LOSS = """
import signal
stream = cluster.stream(question, SamplingParams(max_tokens=500, ignore_eos=True))
next(iter(stream))
os.kill(cluster.nodes[1].pid, signal.SIGKILL)
stream.result()
"""


@dataclass
class Scene:
    """What happened, and where it could have left something."""

    root: Path
    outside: Path
    secret: Canary
    prompt: Canary
    inherited: Canary
    notebook: Any = field(default_factory=new_notebook)
    facts: dict[str, Any] = field(default_factory=dict)
    keys: list[Canary] = field(default_factory=list)
    processes: dict[str, bytes] = field(default_factory=dict)
    listening: dict[str, list[str]] = field(default_factory=dict)
    modes: dict[Path, os.stat_result] = field(default_factory=dict)
    found: dict[str, list[str]] = field(default_factory=dict)
    logs: dict[str, bytes] = field(default_factory=dict)
    streams: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def canaries(self) -> list[Canary]:
        return [self.secret, self.prompt, self.inherited, *self.keys]

    def said(self, number: int) -> str:
        """Everything a cell showed."""
        return "\n".join(
            output.get("text", "") + str(output.get("data", "")) + "\n".join(output.get("traceback", []))
            for output in self.notebook.cells[number].outputs
        )


class Kernel:
    """Cells, one by one, in a real kernel, as `nbclient` runs a notebook."""

    def __init__(self, scene: Scene, stack: ExitStack) -> None:
        work = scene.root / "work"
        self.scene = scene
        self.client = NotebookClient(
            scene.notebook,
            km=AsyncKernelManager(transport="ipc", ip=str(scene.root / "kernel"), kernel_name="python3"),
            timeout=60,
            ipython_hist_file="",  # else nbclient keeps the history in memory
            extra_arguments=["--debug"],
        )
        env = {
            **os.environ,
            "IPYTHONDIR": str(scene.root / "ipython"),
            "XDG_RUNTIME_DIR": str(scene.root / "run"),
            "OUTSIDE": str(scene.outside),
            "PYTHONPATH": str(REPO),
            "PYTHONASYNCIODEBUG": "1",  # asyncio then logs slow callbacks with their arguments
            "MLXCEL_NB_LOG": "DEBUG",
            "MLXCEL_CLUSTER_SECRET": scene.inherited.value.decode(),
        }
        output = stack.enter_context((work / "kernel.log").open("wb"))
        stack.enter_context(self.client.setup_kernel(env=env, cwd=str(work), stdout=output, stderr=output))
        stack.callback(self.client._cleanup_kernel)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.client.km.provisioner.pid)

    def run(self, code: str, *, fails: bool = False) -> str:
        """What the cell showed; it also stays in the notebook."""
        cells = self.scene.notebook.cells
        cells.append(new_code_cell(code))
        number = len(cells) - 1
        failed = False
        try:
            self.client.execute_cell(cells[number], number)
        except CellExecutionError:
            failed = True
        assert failed == fails, f"{code}: {self.scene.said(number)}"
        return self.scene.said(number)


@pytest.fixture(scope="module")
def scene(smollm2: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-")))  # short: sockets lie below it
        outside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-outside-")))
        made = Scene(
            root=root,
            outside=outside,
            secret=Canary("cluster secret", f"canary-{secrets.token_hex(16)}".encode()),
            inherited=Canary("secret in the kernel's environment", f"canary-{secrets.token_hex(16)}".encode()),
            prompt=Canary("prompt", CANARY_WORDS.encode(), load_tokenizer(smollm2).encode(QUESTION)),
        )
        with own_loopback():
            play(made, stack)
        yield made


@contextlib.contextmanager
def own_loopback() -> Iterator[None]:
    """An interface on which nobody else talks, where one can be made: other tests send gigabytes over the machine's,
    which would fill the capture and leave holes in it.
    """
    if missing():
        yield
        return
    with hosts(1) as (host,), host.inside():
        yield


def play(scene: Scene, stack: ExitStack) -> None:
    """The whole story, from the first cell to the saved notebook."""
    root, outside = scene.root, scene.outside
    for folder in ("work", "run", "ipython/profile_default"):
        (root / folder).mkdir(parents=True)
    (root / "ipython/profile_default/ipython_config.py").write_text(HISTORY)
    (outside / "prompts").write_text(json.dumps([QUESTION, BEGINNING]))
    good, loose = outside / "secret", outside / "loose"
    for file, mode in ((good, 0o600), (loose, 0o644)):
        file.write_bytes(scene.secret.value + b"\n")
        file.chmod(mode)
    derived = {"auth": auth_key(scene.secret.value), "beacon": beacon_key(scene.secret.value)}
    scene.keys += [Canary(f"key of {name}", value) for name, value in derived.items()]

    with capturing(outside / "loopback.pcap") as capture, ExitStack() as while_captured:
        kernel = Kernel(scene, while_captured)
        kernel.run(PREPARE)
        kernel.run(f"%mlxcel cluster start -n 2 --cluster-secret-file {good}")
        kernel.run("%mlxcel load smollm2-135m --pp 2")
        for code in (HOLD, GENERATE, CHAT, IN_PYTHON, CONNECTION_KEYS, STATUS, LOOK_ROUND):
            kernel.run(code)
        kernel.run(SHOW_EVERYTHING)
        kernel.run(f"%%px\n{SHOW_EVERYTHING}")
        kernel.run("%xmode Verbose")
        assert "authentication failed" in kernel.run(STRANGER)
        for code, error in FAILURES.items():
            assert error in kernel.run(code.replace("{loose}", str(loose)), fails=True)
        scene.facts = json.loads((outside / "facts.json").read_text())
        scene.keys += [
            Canary("key of a connection", bytes.fromhex(key)) for key in (outside / "keys").read_text().split()
        ]
        look_round(scene, kernel)
        assert "engine-1" in kernel.run(LOSS, fails=True)
        search(scene)
        kernel.run("%mlxcel cluster stop")
        speak_plainly(MARK.encode())
    scene.streams = capture.streams()
    save(scene)
    search(scene)


def look_round(scene: Scene, kernel: Kernel) -> None:
    """What other processes can see of ours while all of it runs."""
    folder = Path(scene.facts["folder"])
    scene.processes["kernel"] = "\0".join(kernel.process.cmdline()).encode()
    for process in kernel.process.children(recursive=True):
        name = " ".join(process.cmdline()[2:])
        scene.processes[name] = repr([process.cmdline(), process.environ()]).encode()
        # UDP has no state; what a visitor has just left is in one of those that come after "established".
        open_ports = [c for c in process.net_connections("inet") if c.status in {psutil.CONN_LISTEN, psutil.CONN_NONE}]
        scene.listening[name] = [c.laddr.ip for c in open_ports]
    for path in [folder.parent, *everything_below(folder)]:
        with contextlib.suppress(FileNotFoundError):  # a file that was there for a moment
            scene.modes[path] = path.lstat()
    scene.logs = {log.name: log.read_bytes() for log in (folder / "logs").iterdir()}
    scene.keys += [Canary(f"control plane's {name}", key.encode()) for name, key in control_plane_keys(folder).items()]


def control_plane_keys(folder: Path) -> dict[str, str]:
    info = json.loads(controller.client_file(folder).read_text())
    return {name: info[name] for name in ("key", "curve_serverkey")}


def search(scene: Scene) -> None:
    """Look through every file there is now. The connection files hold the control plane's keys: that is their use."""
    folder = Path(scene.facts["folder"])
    files = {controller.client_file(folder).name, controller.engine_file(folder).name}
    scene.found |= found_below(scene.canaries, scene.root, except_for=files)


def save(scene: Scene) -> None:
    """As Jupyter's server saves a notebook, with a checkpoint."""
    contents = LargeFileManager(root_dir=str(scene.root / "work"))
    model = {"type": "notebook", "format": "json", "content": scene.notebook}
    contents.save(model, "answers.ipynb")
    contents.create_checkpoint("answers.ipynb")


# ------------------------------------------------------------------------------------------- the traps work


def test_each_spelling_of_a_canary_is_found(tmp_path: Path) -> None:
    canary = Canary("bird", b"tweet \xff tweet", ids=(7, 8, 9))
    for form, needle in canary.forms().items():
        (tmp_path / "log").write_bytes(b"before " + needle + b" after")
        assert found_below([canary], tmp_path) == {str(tmp_path / "log"): [f"bird ({form})"]}, form
    for shift in range(3):
        (tmp_path / "log").write_bytes(base64.b64encode(b"abc"[:shift] + canary.value + b"xyz"))
        assert found_below([canary], tmp_path), shift


def test_what_was_to_be_written_down_was(scene: Scene) -> None:
    """A mark that is no secret is in the history, the notebook, its checkpoint and the logs: all of these are real."""
    mark = Canary("mark", MARK.encode())
    holding = found_below([mark], scene.root)
    for name in ("history.sqlite", "answers.ipynb", "answers-checkpoint.ipynb", "kernel.log"):
        assert [path for path in holding if path.endswith(name)], f"{name} is not among {list(holding)}"
    assert b"DEBUG" in (scene.root / "work" / "every-logger.log").read_bytes()
    assert b"Control received" in scene.logs["engine-0.log"]
    assert len(scene.keys) >= 12, "both directions of the links to two engines, and four others"


def test_the_question_was_answered_every_way(scene: Scene) -> None:
    assert len(scene.facts["texts"]) == 5
    assert all("Paris" in text for text in scene.facts["texts"]), scene.facts["texts"]


# ------------------------------------------------------------------------------------------- what was left behind


def test_no_file_holds_a_canary(scene: Scene) -> None:
    """Logs at DEBUG, history, notebook, checkpoint, profiles, names of sockets: while it ran, and at the end."""
    assert scene.found == {}


def test_the_history_database_holds_the_cells_as_typed_and_no_canary(scene: Scene) -> None:
    (file,) = scene.root.rglob("history.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as database:
        rows = list(database.execute("select source_raw from history"))
        rows += list(database.execute("select output from output_history"))
    assert len(rows) >= len(scene.notebook.cells)
    assert found_in(scene.canaries, repr(rows).encode()) == []


def test_no_process_shows_a_canary_in_its_arguments_or_environment(scene: Scene) -> None:
    assert len(scene.processes) >= 4
    assert {name: hits for name, seen in scene.processes.items() if (hits := found_in(scene.canaries, seen))} == {}


def test_nothing_shown_holds_a_canary(scene: Scene) -> None:
    """Reprs of all our objects in kernel and engines, `%px`, verbose tracebacks of failures."""
    shown = "\n".join(scene.said(number) for number in range(len(scene.notebook.cells)))
    assert "<secret: " in shown and "<Sealer" in shown, "the objects that hold secrets were shown"
    assert found_in(scene.canaries, shown.encode()) == []


def test_there_is_no_database_of_tasks(scene: Scene) -> None:
    databases = {path.name for path in scene.modes if path.suffix in {".db", ".sqlite", ".sqlite3"}}
    assert databases == set()


# ------------------------------------------------------------------------------------------- the network


def test_the_capture_saw_the_data_plane(scene: Scene) -> None:
    """Else the next test could not fail: handshakes at every node's port, and what was sent in the clear."""
    for _, _, port in scene.facts["nodes"]:
        opened = [data for (_, to), data in scene.streams.items() if to == port]
        assert sum(data.startswith(b"MXNB") for data in opened) >= 1, port
        assert sum(map(len, opened)) > 1000, port
    assert any(MARK.encode() in data for data in scene.streams.values())


def test_the_capture_shows_neither_secret_nor_prompt_nor_answer(scene: Scene) -> None:
    assert {flow: hits for flow, data in scene.streams.items() if (hits := found_in(scene.canaries, data))} == {}
    ports = {port for _, _, port in scene.facts["nodes"]}
    ours = b"".join(data for flow, data in scene.streams.items() if ports & set(flow))
    around_it = [b"finish_reason", b"token_ids", b"max_tokens", b"prefill"]
    assert [word for word in (b"capital", b"France", b"Paris", *around_it) if word in ours] == []


def test_only_the_data_plane_listens_and_only_on_loopback(scene: Scene) -> None:
    engines = {name: ips for name, ips in scene.listening.items() if "debugging_engine" in name}
    assert list(engines.values()) == [["127.0.0.1"], ["127.0.0.1"]]
    assert [ips for name, ips in scene.listening.items() if name not in engines and ips] == []


# ------------------------------------------------------------------------------------------- other users


def test_no_other_user_can_reach_a_file_or_a_socket_of_the_cluster(scene: Scene) -> None:
    folder = Path(scene.facts["folder"])
    assert {scene.modes[path].st_uid for path in scene.modes} == {os.getuid()}
    assert [stat.S_IMODE(scene.modes[path].st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]
    sockets = [path for path, info in scene.modes.items() if stat.S_ISSOCK(info.st_mode)]
    assert len(sockets) >= 10
    logs = [path for path in scene.modes if path.parent == folder / "logs"]
    private = [*sockets, *logs, controller.client_file(folder), controller.engine_file(folder)]
    assert [path for path in private if stat.S_IMODE(scene.modes[path].st_mode) & 0o077] == []

"""The rules of the house that no linter knows: floors, sizes, names that stay out, documents that stay true."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import mlxcel_nb
from mlxcel_nb.util import times

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "mlxcel_nb"

FLOORS = {
    "errors": 0,
    "util": 0,
    "cluster": 1,
    "wire": 2,
    "plan": 3,
    "scheduling": 3,
    "net": 4,
    "models": 5,
    "runtime": 6,
    "launch": 7,
    "client": 8,
    "display": 9,
    "commands": 9,
    "notebook": 9,
    "serve": 9,
    "cli": 9,
    "__main__": 9,
    "__init__": 9,
}
"""Imports run from a higher figure to a lower or the same one: the drawing is in docs/architecture.md."""

TOP_STEPS = ("display", "serve", "commands", "notebook")
"""Floor 9 has steps: each of these rooms may import those before it, never one after it."""

MAX_LINES = 450
"""A file longer than this usually holds two things."""

MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tracked_text() -> dict[Path, str]:
    """Every text file that a commit made now would hold, by its path in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = {}
    for name in filter(None, listed.split("\0")):
        path = REPO / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            with contextlib.suppress(UnicodeDecodeError):  # a corpus of inputs holds what is no text
                found[Path(name)] = data.decode()
    return found


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def floor_of(module: str) -> int:
    """Floor of a dotted name such as `mlxcel_nb.wire.frames`."""
    parts = module.split(".")
    return FLOORS[parts[1] if len(parts) > 1 else "__init__"]


def imported(path: Path) -> Iterator[str]:
    """Modules of ours that `path` imports, at its top, inside functions and for types alike."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "mlxcel_nb")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports name the package in full"
            if (node.module or "").split(".")[0] != "mlxcel_nb":
                continue
            for alias in node.names:
                child = PACKAGE.joinpath(*str(node.module).split(".")[1:], alias.name)
                is_module = child.is_dir() or child.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def name_of(path: Path) -> str:
    relative = path.relative_to(REPO).with_suffix("")
    return ".".join(relative.parts[:-1] if relative.name == "__init__" else relative.parts)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_downhill(path: Path) -> None:
    here = floor_of(name_of(path))
    uphill = [name for name in imported(path) if floor_of(name) > here and name != "mlxcel_nb"]
    assert not uphill, f"{name_of(path)} is on floor {here} and imports {uphill}"


@pytest.mark.parametrize("step", range(len(TOP_STEPS)), ids=TOP_STEPS.__getitem__)
def test_the_top_floor_has_no_circle(step: int) -> None:
    above = {f"mlxcel_nb.{room}" for room in (*TOP_STEPS[step + 1 :], "cli", "__main__")}
    for path in sorted((PACKAGE / TOP_STEPS[step]).rglob("*.py")):
        upstairs = [name for name in imported(path) if ".".join(name.split(".")[:2]) in above]
        assert not upstairs, f"{name_of(path)} imports {upstairs}"


def test_the_package_root_is_imported_for_its_version_alone() -> None:
    """The root exports the top floor lazily, so a lower one could climb through it unseen."""
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "mlxcel_nb" and floor_of(name_of(path)) < 9:
                names = {alias.name for alias in node.names} & set(mlxcel_nb.__all__)
                assert names <= {"__version__"}, f"{path}:{node.lineno}"


def test_every_room_has_a_floor() -> None:
    rooms = {
        path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if not path.name.startswith("__p")
    }
    code = {room for room in rooms if (PACKAGE / f"{room}.py").is_file() or any((PACKAGE / room).glob("*.py"))}
    assert code <= set(FLOORS), f"no floor yet: {sorted(code - set(FLOORS))}"


def test_importing_the_package_loads_none_of_the_heavy_ones() -> None:
    heavy = {"mlx", "mlx_lm", "ipyparallel", "IPython", "numpy", "transformers", "zmq"}
    code = f"import sys, mlxcel_nb; print(sorted({heavy!r} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_opens_with_its_purpose(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module) or not module.body, f"{path.relative_to(REPO)} has no docstring"


def test_no_file_has_outgrown_a_few_screens() -> None:
    long = {
        str(path): lines
        for path, text in tracked_text().items()
        if path.suffix in {".py", ".js", ".ts"} and (lines := text.count("\n")) > MAX_LINES
    }
    assert not long


def test_no_package_registry_is_named() -> None:
    """Mirrors differ from place to place; the ordinary clients know theirs."""
    host = re.compile(r"https?://[a-z0-9.-]*(pypi|pythonhosted|npm|yarn|debian|crates)[a-z0-9.-]*", re.IGNORECASE)
    assert not hits(host)


def test_no_machine_is_named() -> None:
    path = re.compile(r"(?<![\w.])/(work|root)/[\w.]|/home/(?!user\b|you\b|jovyan\b)\w+|/Users/(?!you\b|me\b)\w+")
    assert not hits(path)


def test_no_secret_was_committed() -> None:
    secret = re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(ghp|gho|hf)_[A-Za-z0-9]{30,}|\bAKIA[0-9A-Z]{16}\b|\bsk-[A-Za-z0-9]{32,}"
    )
    assert not hits(secret)


def hits(pattern: re.Pattern[str]) -> list[str]:
    here = Path(__file__).relative_to(REPO)
    return [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in tracked_text().items()
        if path != here
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


UNSAFE = {"pickle", "cloudpickle", "marshal", "dill", "shelve"}


@pytest.mark.parametrize("path", [p for p in MODULES if "launch" not in p.parts], ids=name_of)
def test_nothing_from_a_peer_is_unpickled_or_evaluated(path: Path) -> None:
    for node in ast.walk(tree(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        assert not UNSAFE & {name.split(".")[0] for name in names}, f"{path}:{node.lineno}"  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            assert called not in {"eval", "exec", "compile", "__import__"}, f"{path}:{node.lineno}"
            if isinstance(node.func, ast.Attribute):
                of_builtins = isinstance(node.func.value, ast.Name) and node.func.value.id == "builtins"
                assert node.func.attr != "recv_pyobj" and not of_builtins, f"{path}:{node.lineno}"
            for keyword in node.keywords:
                assert keyword.arg not in {"allow_pickle", "trust_remote_code"} or (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ), f"{path}:{node.lineno}"


def test_no_default_binds_every_interface() -> None:
    everywhere = [
        f"{path}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and node.value in {"0.0.0.0", "::", "*:0"}
        if "reason" not in path.read_text().splitlines()[node.lineno - 1]
    ]
    assert not everywhere, "a bind to every interface is asked for by the user, never a default"


def test_no_test_sleeps_or_is_left_out_without_a_reason() -> None:
    """A comment on the line or above it, or a `reason=`, says why a condition could not be waited for."""
    pattern = re.compile(r"\btime\.sleep\(|\bpytest\.(mark\.)?(skip|skipif|xfail|importorskip)\b")
    bare = []
    for path in sorted((REPO / "tests").rglob("*.py")):
        if path == Path(__file__):
            continue
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            explained = "#" in line or "reason=" in line or (number > 1 and lines[number - 2].lstrip().startswith("#"))
            if pattern.search(line) and not explained:
                bare.append(f"{path.relative_to(REPO)}:{number}: {line.strip()}")
    assert not bare


def test_nothing_is_left_for_later() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b")
    for path in MODULES:
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type in {tokenize.COMMENT, tokenize.NAME}:
                    assert not later.search(token.string), f"{path}:{token.start[0]}: {token.line.strip()}"


# -------------------------------------------------------------------------------------------------- documents


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
    assert metadata.version("mlxcel_nb") == mlxcel_nb.__version__
    assert f"## [{mlxcel_nb.__version__}]" in (REPO / "CHANGELOG.md").read_text()


def test_every_dependency_is_bounded_and_acknowledged() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra]
    acknowledged = (REPO / "THIRD_PARTY.md").read_text()
    for line in wanted:
        name = re.match(r"[\w-]+", line)
        assert name
        assert re.search(rf"\b{name[0]}\b", acknowledged), f"{name[0]} is not in THIRD_PARTY.md"
        assert ">=" in line, f"{line} has no lower bound"


FEATURES = (
    [f"S{n}" for n in range(1, 13)]
    + [f"C{n}" for n in range(1, 12)]
    + [f"D{n}" for n in range(1, 7)]
    + [f"N{n}" for n in range(1, 14)]
    + [f"G{n}" for n in range(1, 7)]
)


def feature_rows() -> list[list[str]]:
    text = (REPO / "docs" / "features.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if re.fullmatch(r"[SCDNG]\d+", row[0])]


def test_features_lists_every_row_once() -> None:
    assert [row[0] for row in feature_rows()] == FEATURES


def test_a_feature_is_done_only_with_tests_that_exist() -> None:
    for name, _, state, proof in feature_rows():
        assert state in {"done", "partly", "not yet"}, name
        tests = re.findall(r"`((?:tests|notebooks)/[^`]+)`", proof)
        assert bool(tests) == (state != "not yet"), f"{name} is {state!r} with {len(tests)} tests"
        for test in tests:
            path, _, function = test.partition("::")
            assert (REPO / path).exists(), f"{name}: {path} is not there"
            assert not function or f"def {function}(" in (REPO / path).read_text(), f"{name}: {test} is not there"


CASES = re.compile(r"\b[Cc]ases? (\d+(?:(?:, | and | to )\d+)*)")


def case_numbers(text: str) -> Iterator[int]:
    """The numbers in "Case 5", "cases 23 to 25, 29", "Cases 60 and 61"."""
    for match in CASES.finditer(text):
        spelled = re.sub(r"(\d+) to (\d+)", lambda m: " ".join(map(str, range(int(m[1]), int(m[2]) + 1))), match[1])
        yield from map(int, re.findall(r"\d+", spelled))


def test_the_table_of_cases_is_what_the_tests_say_of_themselves() -> None:
    said: dict[int, set[str]] = {}
    for path, text in tracked_text().items():
        if path.parts[0] == "tests" and path.suffix == ".py" and path.name != Path(__file__).name:
            for number in case_numbers(text):
                said.setdefault(number, set()).add(str(path))
    page = (REPO / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", page, re.MULTILINE)
    assert {int(number): set(re.findall(r"`([^`]+)`", tests)) for number, tests in rows} == said


def test_the_table_of_times_is_on_the_page() -> None:
    page = (REPO / "docs" / "architecture.md").read_text()
    shown = dict(re.findall(r"^\| `([A-Z_]+_S)` \| (\d+) \|", page, re.MULTILINE))
    assert shown == {name: f"{value:g}" for name, value in vars(times).items() if name.endswith("_S")}


def pages() -> list[Path]:
    return [path for path in tracked_text() if path.suffix == ".md"]


LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|(?:src|srcset|href)=\"([^\"]+)\"")


@pytest.mark.parametrize("page", pages(), ids=str)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(tracked_text()[page]):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (REPO / page.parent / path) if path else REPO / page
        assert file.exists(), f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{page}: {target}"


def anchors(text: str) -> set[str]:
    """Names of the headings as GitHub and MyST make them, and explicit `(name)=` targets."""
    headings = re.findall(r"^#+\s+(.+?)\s*$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def test_the_readme_has_exactly_two_commands() -> None:
    shells = re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in shells for line in block.splitlines() if line.strip()]
    assert lines == ["make demo", "make test"]

"""Every error a user can meet, in one hierarchy.

An error names the node it happened on, the cause, and what to do. It is one or two lines in a cell or a
terminal, and a plain dict on the wire, so an error raised on rank 3 reads the same in the notebook. Notes that were
added to it (the last words of a process that is gone) follow, indented, and a table where it has one. Anybody may raise
these; nothing here does I/O.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from mlxcel_nb.util.columns import aligned


class Table(NamedTuple):
    """What stands below an error's words where several nodes are compared: as text here, drawn by `display.errors`.

    A cell that is None is shown as a dash. The columns whose titles are in `numbers` are set flush right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | None, ...], ...]
    numbers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The table as plain text."""
        rows = [["–" if cell is None else cell for cell in row] for row in self.rows]
        right = [title in self.numbers for title in self.columns]
        return [self.title, *aligned(self.columns, rows, right), *self.notes]


class MlxcelError(Exception):
    """Base of all errors of this package.

    Args:
        cause: what went wrong, without a final full stop being required.
        node: id of the node it happened on, if one did.
        advice: what the user can do about it.
    """

    code: ClassVar[str] = "error"

    def __init__(self, cause: str, *, node: str | None = None, advice: str | None = None) -> None:
        self.cause = cause
        self.node = node
        self.advice = advice
        self.table: Table | None = None
        super().__init__(str(self))

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        what = f"{where}{self.cause}"
        if not self.advice:
            return what
        return f"{what if what.endswith('?') else what.rstrip('.') + '.'} {self.advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.cause, self.node, self.advice)

    def at(self, node: str) -> MlxcelError:
        """The same error with `node` filled in where none was named yet."""
        if self.node:
            return self
        moved = type(self)(self.cause, node=node, advice=self.advice)
        moved.table = self.table
        for note in getattr(self, "__notes__", ()):
            moved.add_note(note)
        return moved

    def to_dict(self) -> dict[str, Any]:
        """What travels in a control frame."""
        return {"code": self.code, "node": self.node, "cause": self.cause, "advice": self.advice}

    def lines(self) -> list[str]:
        """What a user is shown: the error, then its notes and its table, indented."""
        notes = [line for note in getattr(self, "__notes__", ()) for line in note.splitlines()]
        notes += self.table.lines() if self.table else []
        return [str(self), *(f"    {printable(line)}".rstrip() for line in notes)]

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of forty lines of frames."""
        first, *notes = self.lines()
        return [f"{type(self).__name__}: {first}", *notes]


def _rebuild(cls: type[MlxcelError], cause: str, node: str | None, advice: str | None) -> MlxcelError:
    return cls(cause, node=node, advice=advice)


class ConfigError(MlxcelError):
    """An option, a layout or a file of the user's that cannot work."""

    code = "config"


class SecretError(ConfigError):
    """A cluster secret that is missing, too short, or readable by others."""

    code = "secret"


class ModelError(MlxcelError):
    """A model that is absent, incomplete or unsupported."""

    code = "model"


class ModelAbsent(ModelError):
    """No model lies where it was looked for."""

    code = "model-absent"


class ModelCutShort(ModelError):
    """A file of the model ends before it should."""

    code = "model-cut-short"


class OutOfMemory(ModelError):
    """A layer does not fit into what is left on the node."""

    code = "memory"


class RequestError(MlxcelError):
    """A generation request that is not legal; the next one works."""

    code = "request"


class PromptError(RequestError):
    """A prompt, or messages, that the model cannot be given: empty, ids that it does not have, a refusing template."""

    code = "invalid_prompt"


class PromptTooLong(PromptError):
    """A prompt beyond the model's context, or beyond what the nodes have room for."""

    code = "context_length_exceeded"


class FormError(RequestError):
    """The form that an answer is to have (a JSON schema, a regular expression, a grammar) cannot be kept to."""

    code = "invalid_form"


class WireError(MlxcelError):
    """Bytes from a peer that break the contract of the data plane; the connection ends."""

    code = "wire"


class FrameError(WireError):
    """A frame with a bad length, a bad tag, or out of turn."""

    code = "frame"


class HandshakeError(WireError):
    """The handshake did not end in an accepted verdict.

    `local` is true when this side refused, false when the peer said so.
    """

    code = "handshake"
    local: bool = True


class AuthenticationFailed(HandshakeError):
    """One side does not know the cluster secret."""

    code = "authentication"


class VersionMismatch(HandshakeError):
    """The peer speaks another version of the handshake."""

    code = "version"


class SuiteMismatch(HandshakeError):
    """The two sides name different cipher suites."""

    code = "suite"


class ClusterMismatch(HandshakeError):
    """The peer belongs to another cluster."""

    code = "cluster-name"


class Refused(HandshakeError):
    """The verdict was not "accepted": capacity, identity, or a duplicate node id."""

    code = "refused"


class PeerLost(MlxcelError):
    """A node's connection ended or went silent."""

    code = "peer-lost"


class StepTimeout(MlxcelError):
    """A step made no progress within its deadline."""

    code = "timeout"


class PeerAborted(MlxcelError):
    """Another rank left the step first; carries that rank's own error."""

    code = "aborted"


class Cancelled(MlxcelError):
    """The user stopped the request."""

    code = "cancelled"


class NodeFailed(MlxcelError):
    """Code on a node raised something unforeseen; the cause holds its type and message."""

    code = "node-failed"


class EngineLost(MlxcelError):
    """An engine's process ended."""

    code = "engine-lost"


class ClusterError(MlxcelError):
    """A cluster that cannot start, is already started, or has stopped."""

    code = "cluster"


class Busy(MlxcelError):
    """The model is at work on another request."""

    code = "busy"


def _subclasses(cls: type[MlxcelError]) -> list[type[MlxcelError]]:
    found = [cls]
    for child in cls.__subclasses__():
        found += _subclasses(child)
    return found


def printable(text: str) -> str:
    """`text` from elsewhere on one line: it ends up in terminals and logs."""
    return "".join(char if char.isprintable() else " " for char in text)


def from_dict(data: dict[str, Any]) -> MlxcelError:
    """The error a peer reported, on one line. Unknown codes become a plain `MlxcelError`."""

    def text(key: str) -> str | None:
        value = data.get(key)
        return printable(value) if isinstance(value, str) else None

    kinds = {cls.code: cls for cls in _subclasses(MlxcelError) if "code" in vars(cls)}
    cls = kinds.get(text("code") or "", MlxcelError)
    return cls(text("cause") or "unknown error", node=text("node"), advice=text("advice"))


def wrap(error: BaseException, node: str) -> MlxcelError:
    """`error` as one of ours, naming `node`: what a node reports of an exception it did not foresee."""
    if isinstance(error, MlxcelError):
        return error.at(node)
    message = str(error).strip().splitlines()
    return NodeFailed(f"{type(error).__name__}: {message[0] if message else 'no message'}", node=node)

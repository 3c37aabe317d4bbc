"""Saving and loading keys and values, a member's side: what it keeps goes out in pieces, and pieces come in.

A router asks (`Kv`), one question at a time, each answered within a turn of the MLX thread, between two steps:

======= ======== =====================================================================================
what    asked of answer
======= ======== =====================================================================================
parts   member   which kv-heads of which caches it keeps, and for which home
find    leader   the kept blocks of a request of this router's that is over; they are held for it
shapes  member   heads and dimensions of each cache, as it keeps them in a block
get     member   pieces of a block
hold    leader   holds what it found for longer, or says that it had to let go
put     member   takes pieces of a block that is to be kept; nothing is kept yet
known   leader   how many blocks of a sequence are kept already, and at which home
adopt   leader   has all members keep the blocks that were put there, as far as there is room; in which step
ran     member   whether it has run that step, so that what was put is kept
done    member   forgets a transfer: blocks that are held may go, and so do pieces that were put
left    member   the same for all transfers of a router; said by the node itself when its link has ended
======= ======== =====================================================================================

A member that has not come to a plan yet, or a request that is not quite over, is answered with None: ask again.
Lives and dies on the MLX thread. Routers are trusted to ask; what they send is checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxcel_nb import errors
from mlxcel_nb.errors import ClusterError, RequestError, WireError
from mlxcel_nb.models.arrays import as_bytes, from_bytes, wire_name
from mlxcel_nb.models.kv_layout import shares
from mlxcel_nb.runtime.kv_staging import Pieces
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.scheduling.adoption import MAX_TRANSFER
from mlxcel_nb.scheduling.step_plan import BLOCK
from mlxcel_nb.util.log import get_logger, trail

if TYPE_CHECKING:
    from mlxcel_nb.runtime.commands import Kv
    from mlxcel_nb.runtime.execution import Execution
    from mlxcel_nb.runtime.worker import Worker

log = get_logger("runtime.kv")

MOST_DIM = 1 << 16
MOST_BLOCKS = 1 << 23
DTYPES = ("float32", "float16", "bfloat16")


def obey(worker: Worker, command: Kv) -> None:
    """Answer one question."""
    try:
        answer = _answer(worker, command)
    except Exception as error:  # noqa: BLE001  # whatever it was, it is the answer
        if not isinstance(error, errors.MlxcelError):
            log.info("kv %s failed: %s", str(command.message.get("what"))[:20], trail(error))
        command.reply({"type": "error", "error": errors.wrap(error, worker.node_id).to_dict()})
    else:
        if answer is not LATER:
            command.reply({"type": "reply", "kv": answer})


LATER: Any = object()
"""The answer is given by a later step."""


def _answer(worker: Worker, command: Kv) -> Any:
    message, instance = command.message, worker.instance
    what = field(message, "what", str)
    if instance is None or (what != "left" and instance.order.instance != field(message, "instance", str)):
        if what in ("left", "done"):
            return True
        raise ClusterError("no such model is loaded", advice="Load one first.")
    staging = instance.staging
    if what == "parts":
        return {"home": instance.home, "shares": [each and list(each) for each in shares(instance.part)]}
    if what == "put":
        shares(instance.part)
        staging.put(command.owner, number(message, "transfer"), number(message, "index", MOST_BLOCKS), _read(message))
        return True
    if what in ("done", "left"):
        transfer = number(message, "transfer") if what == "done" else None
        staging.drop(command.owner, transfer)
        if worker.engine is not None:
            worker.engine.kept.release(command.owner, transfer)
        return True
    if what in ("find", "hold", "known", "adopt"):
        if worker.engine is None:
            raise WireError(f"kv {what!r} is for the leader")
        if what == "hold":
            return worker.engine.kept.touch(command.owner, number(message, "transfer"))
        execution = worker.engine.execution
        epoch = execution.epoch if execution is not None else 0
        return worker.engine.kept.answer(what, message, command.owner, command.reply, epoch)
    if what in ("shapes", "get", "ran"):
        follows = worker.engine or worker.follower
        execution = follows.execution if follows is not None else None
        epoch = number(message, "epoch")
        coming = worker.engine is None if execution is None else execution.epoch < epoch
        if coming:
            return None  # it has not come to it yet
        if execution is None or execution.epoch > epoch:
            raise ClusterError("what was kept is gone: a step failed meanwhile", advice="Try again.")
        if what == "ran":
            return True if execution.ran >= number(message, "step") else None
        return _told(what, message, execution)
    raise WireError(f"kv {what!r:.40} is unknown here")


def _told(what: str, message: dict[str, Any], execution: Execution) -> Any:
    """Of a kept block its shapes, or pieces; None where this member has not come to it yet."""
    block = execution.block(number(message, "block"))
    if block is None:
        return None
    if what == "shapes":
        layers = block.layers
        held = [each for each in layers if each is not None]
        dtypes = {wire_name(x.dtype) for pair in held for x in pair}
        if any(keys.shape[1] != values.shape[1] for keys, values in held) or len(dtypes) > 1:
            raise RequestError("what this model keeps cannot be saved: its keys and values are not of one kind")
        told = [each and [each[0].shape[1], each[0].shape[3], each[1].shape[3]] for each in layers]
        return {"dtype": next(iter(dtypes), ""), "layers": told}
    found = []
    for cache, which in _places(message):
        pair = block.layer(cache) if cache < len(block.places) else None
        if pair is None:
            raise WireError(f"nothing of layer {cache} is kept here")
        found.append(bytes(as_bytes(pair[which])))
    return found


def _places(message: dict[str, Any]) -> list[tuple[int, int]]:
    told = field(message, "pieces", list)
    if not all(isinstance(each, list) and len(each) >= 2 and min(map(_small, each[:2])) >= 0 for each in told):
        raise WireError("kv: its pieces cannot be read")
    if any(each[1] > 1 for each in told):
        raise WireError("kv: a piece is neither keys nor values")
    return [(each[0], each[1]) for each in told]


def _small(value: Any) -> int:
    """The value where it is a small whole number, else -1."""
    return value if type(value) is int and 0 <= value < MOST_DIM else -1


def _read(message: dict[str, Any]) -> Pieces:
    """The arrays of a `put`, (1, H, BLOCK, D) each."""
    dtype, places = field(message, "dtype", str), _places(message)
    if dtype not in DTYPES:
        raise WireError(f"kv: keys and values of {dtype!r:.20}")
    found: Pieces = {}
    for place, told in zip(places, message["pieces"], strict=True):
        if len(told) != 5 or min(_small(told[2]), _small(told[3])) < 1 or not isinstance(told[4], bytes):
            raise WireError("kv: its pieces cannot be read")
        found[place] = from_bytes(told[4], dtype, (1, told[2], BLOCK, told[3]))
    mx.eval(list(found.values()))
    return found


def number(message: dict[str, Any], name: str, most: int = MAX_TRANSFER) -> int:
    """A whole number from 0 to `most`."""
    value = field(message, name, int)
    if not 0 <= value <= most:
        raise WireError(f"kv: field {name!r} is {value}")
    return int(value)


def pack_ids(ids: list[int]) -> bytes:
    """Token ids as they travel."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_ids(told: bytes) -> list[int]:
    if len(told) % 4:
        raise WireError(f"kv: {len(told)} bytes are no token ids")
    return list(struct.unpack(f"<{len(told) // 4}I", told))


Reply = Callable[[dict[str, Any]], None]
"""Takes the answer to a question, on any thread."""

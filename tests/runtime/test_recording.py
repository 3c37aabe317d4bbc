"""What a member notes of a request, and gives when it is asked."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import MlxcelError, RequestError, WireError
from mlxcel_nb.models.verifying.recording import K, sketch
from mlxcel_nb.runtime.recording import Recording, answer, check_room


def question(**changes: Any) -> dict[str, Any]:
    return {"type": "recorded", "id": "q", "request": "r", "what": "logits", "index": 0, **changes}


def noted() -> Recording:
    recording = Recording("r")
    for length in (3, 1):
        recording.on_layer(2, mx.ones((1, length, 8), mx.bfloat16))
        recording.on_logits(mx.arange(5).astype(mx.float16))
    return recording


def test_it_is_told_when_the_request_is_over() -> None:
    recording = noted()
    assert answer(recording, question()) is None
    recording.finish()
    logits = answer(recording, question(index=1))
    assert logits is not None
    assert np.frombuffer(logits, np.float32).tolist() == [0, 1, 2, 3, 4]
    layer = answer(recording, question(what="layer", index=2))
    assert layer is not None
    told = np.frombuffer(layer, np.float32).reshape(-1, K)
    np.testing.assert_allclose(told, sketch(np.ones((4, 8), np.float32)), rtol=1e-5, atol=1e-6)  # rows by rows, or all
    for missing in (question(index=2), question(index=-1), question(what="layer"), question(what="layer", index=-1)):
        assert answer(recording, missing) == b""


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"request": "s"}, RequestError),
        ({"request": 3}, WireError),
        ({"what": None}, WireError),
        ({"index": "0"}, WireError),
    ],
)
def test_other_questions_are_refused(change: dict[str, Any], error: type[MlxcelError]) -> None:
    with pytest.raises(error):
        answer(noted(), question(**change))
    with pytest.raises(MlxcelError):
        answer(None, question(**change))


def test_no_more_is_noted_than_there_is_room_for() -> None:
    check_room(64, 200_000)
    with pytest.raises(RequestError, match="Ask for fewer"):
        check_room(1000, 200_000)

"""What the API says when it cannot do what is asked: OpenAI's shape of an error, and its status. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.models.params import CONSTRAINTS, SamplingParams

BUSY_RETRY_S = 1
"""When a queue is full: some request of it has ended by then."""

AWAY_RETRY_S = 5
"""When the model cannot be had: about as long as it takes to load a small one."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        message: for the user, who may be a program's author or its user.
        param: the field of the request that it is about.
        code: for programs to tell errors of one status apart.
        retry_s: the same request may work after so many seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_s is not None:
            self.headers["retry-after"] = str(math.ceil(retry_s))

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong, or asks for what is not there."""
    return ApiError(400, message, param=param, code=code)


def away(message: str, code: str = "model_not_loaded") -> ApiError:
    """The model cannot be had now."""
    return ApiError(503, message, code=code, retry_s=AWAY_RETRY_S)


def stopping() -> ApiError:
    return away("the server is stopping", code="stopping")


def of(error: MlxcelError, *, prompt: str | None = None, form: str | None = None) -> ApiError:
    """What an error of the cluster is to a caller of the API.

    Args:
        prompt, form: the fields of his request that hold the prompt, and the form that its answer is to have.
    """
    if isinstance(error, errors.PromptError):
        return refused(str(error), prompt, code=error.code)
    if isinstance(error, errors.FormError):
        return refused(str(error), form, code=error.code)
    if isinstance(error, errors.RequestError | errors.ConfigError):
        return refused(str(error), _field(error), code=error.code)
    if isinstance(error, errors.Busy):
        return ApiError(429, str(error), code=error.code, retry_s=BUSY_RETRY_S)
    if isinstance(error, _AWAY):  # the advice is for whoever owns the cluster
        return away(f"{error.node}: {error.cause}" if error.node else error.cause, code=error.code)
    return ApiError(500, str(error), code=error.code)


def _field(error: MlxcelError) -> str | None:
    """The field of a request that an error is about: those of sampling begin with its name."""
    return _FIELDS.get(error.cause.split(" ", 1)[0])


_FIELDS = {
    **{field.name: field.name for field in dataclasses.fields(SamplingParams)},
    "json_schema": "response_format",
    "json_object": "response_format",
}
"""The API's names of what the engine calls otherwise."""


def form_field(params: SamplingParams) -> str | None:
    """The field of a request that says what form its answer is to have."""
    return next((_FIELDS[name] for name in CONSTRAINTS if getattr(params, name) not in (None, False)), None)


_AWAY = (
    errors.PeerLost,
    errors.EngineLost,
    errors.ClusterError,
    errors.StepTimeout,
    errors.PeerAborted,
    errors.Cancelled,
)
"""The request was good, and those who should have answered it are gone, stopped, or too slow."""

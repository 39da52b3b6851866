"""Faults as OpenAI's clients know them: ``{"error": {message, type, param, code}}``.

What a caller can cause is a 4xx that says what to change. Anything else is a 500 without details:
those go to the log, with the request's id.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException

from dspark.errors import DSparkError, MissingDependencyError

NAMES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class APIError(HTTPException):
    """A refusal. ``param`` names the field at fault, ``code`` is OpenAI's word for the case."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self.detail),
                "type": NAMES.get(self.status_code, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """A 400."""
    return APIError(400, message, param=param, code=code)


def refused(error: DSparkError) -> APIError:
    """What the library refused before anything was generated, as a 400."""
    words = error.where.split()
    param = words[-1] if error.where.startswith("sampling parameter ") else None
    message = f"{error.where}: expected {error.expected}; found {error.found}. {error.fix}"
    if isinstance(error, MissingDependencyError):
        return APIError(501, message, param=param, code="not_installed")
    return bad_request(message, param)


def internal() -> APIError:
    """A 500 that gives nothing away."""
    return APIError(500, "The server failed to answer this request. It was logged.")


def of_validation(errors: list[dict[str, Any]]) -> APIError:
    """A 400 about the first of pydantic's findings."""
    first = errors[0] if errors else {"loc": (), "msg": "not a valid request", "type": ""}
    path = [str(part) for part in first["loc"] if part != "body"]
    name = ".".join(path) or None
    if first["type"] == "unsupported":
        told: Any = first["ctx"]
        return bad_request(str(first["msg"]), str(told["param"]))
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {name}", name)
    if first["type"] == "missing" and not name:
        return bad_request("A JSON body is required, with Content-Type: application/json.")
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: {name!r}.", name)
    # A field of several possible forms has a finding for each: none of them alone says what is
    # wrong.
    own = [error for error in errors if error["loc"][:2] == first["loc"][:2]]
    said = "; or ".join(list(dict.fromkeys(str(error["msg"]) for error in own))[:4])
    name = name if len(own) == 1 else path[0] if path else None
    return bad_request(f"{name}: {said}" if name else said, name)

"""The routes. Each is a few lines: check the model, make the request, stream it or collect it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.exceptions import HTTPException

from dspark.config.architecture import Frozen
from dspark.errors import DSparkError
from dspark.server.chat import Chat
from dspark.server.completions import Completions
from dspark.server.errors import APIError, bad_request, internal, of_validation, refused
from dspark.server.guard import Guard
from dspark.server.playground import HEADERS, playground
from dspark.server.protocol import ChatRequest, CompletionRequest
from dspark.server.respond import ClientGone, EventStream, while_there
from dspark.server.service import Event, Service

LOG = logging.getLogger("dspark.server")


class FaultBody(BaseModel):
    """What OpenAI's clients read of a fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Fault(BaseModel):
    error: FaultBody


FAULTS: dict[int | str, dict[str, Any]] = {
    status: {"model": Fault} for status in (400, 401, 404, 408, 413, 422, 429, 500, 501)
}


class About(Frozen):
    """What ``/health`` and the playground say of the server besides its engine.

    ``examples`` are conversations that the page offers to whoever does not know what to ask.
    """

    version: str
    target: str
    draft: str | None
    block_size: int
    examples: tuple[tuple[dict[str, str], ...], ...] = ()


class _StrictJSON(Request):
    """Bodies as strict JSON: UTF-8, no NaN, no lone surrogates, bounded depth."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False, allow_partial=False)
        except ValueError as error:
            raise bad_request(f"The body is not valid JSON: {error}") from error


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictJSON(request.scope, request.receive))

        return strict


def create_app(service: Service, about: About, keys: Sequence[str] = ()) -> FastAPI:
    """The server of one engine.

    Args:
        service: the engine and its limits.
        about: what the pages say.
        keys: API keys; none of them leaves the server open.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.begin()
        yield
        service.close()

    # No interactive docs: they load their scripts from elsewhere.
    app = FastAPI(
        title="dspark", version=about.version, docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.router.route_class = _Route
    limits = service.limits
    app.add_middleware(
        Guard, keys=list(keys), body_bytes=limits.body_bytes, body_seconds=limits.body_seconds
    )
    _handle_faults(app)
    _add_answers(app, service)
    _add_facts(app, service, about, bool(keys))
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=FAULTS, response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        _check_model(service, body.model)
        made = await Completions.of(service, body)
        return await _answer(request, service, made, bool(body.stream))

    @app.post("/v1/chat/completions", responses=FAULTS, response_model=None)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        _check_model(service, body.model)
        made = await Chat.of(service, body)
        return await _answer(request, service, made, bool(body.stream))


def _add_facts(app: FastAPI, service: Service, about: About, locked: bool) -> None:
    card = {
        "id": service.name, "object": "model", "created": service.made, "owned_by": "dspark",
        "root": about.target, "parent": None, "max_model_len": service.max_length,
        "draft": about.draft, "permission": [],
    }  # fmt: skip

    @app.get("/v1/models", responses=FAULTS)
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", responses=FAULTS)
    async def model(model: str) -> dict[str, Any]:
        """The one model, if it is that one."""
        _check_model(service, model)
        return card

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Alive."""
        return {"status": "ok", "version": about.version, "model": service.name}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """dspark's version."""
        return {"version": about.version}

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/debug/mtp_stats", responses=FAULTS)
    async def mtp_stats() -> dict[str, Any]:
        """Acceptance since the start, with ATOM's fields."""
        return service.metrics.mtp_stats()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        """The playground."""
        facts = {**about.model_dump(), "model": service.name, "locked": locked}
        return HTMLResponse(playground(facts), headers=HEADERS)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.name:
        raise APIError(
            404,
            f"The model {name!r} does not exist. This server has {service.name!r}.",
            param="model",
            code="model_not_found",
        )


async def _answer(
    request: Request, service: Service, made: Completions | Chat, streamed: bool
) -> Response:
    events = cast(AsyncGenerator[Event, None], made.events())
    try:
        if not streamed:
            return JSONResponse(await while_there(request.receive, made.whole(events)))
        # What is refused at once still has a status of its own; only then the stream begins.
        first = await while_there(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise

    async def pieces() -> AsyncGenerator[bytes, None]:
        async with aclosing(events), aclosing(made.stream(_again(first, events))) as stream:
            async for piece in stream:
                yield piece

    return EventStream(pieces(), service.limits.stall_seconds)


async def _again(first: Event, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for item in events:
        yield item


def _handle_faults(app: FastAPI) -> None:
    def respond(error: APIError) -> Response:
        return JSONResponse(error.body, error.status_code, headers=error.headers)

    @app.exception_handler(HTTPException)
    async def of_http(_: Request, error: HTTPException) -> Response:
        if not isinstance(error, APIError):
            headers = dict(error.headers) if error.headers else None
            error = APIError(error.status_code, str(error.detail), headers=headers)
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def of_body(_: Request, error: RequestValidationError) -> Response:
        return respond(of_validation(list(error.errors())))

    @app.exception_handler(DSparkError)
    async def of_library(_: Request, error: DSparkError) -> Response:
        return respond(refused(error))

    @app.exception_handler(ClientGone)
    async def of_nobody(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def of_bugs(request: Request, error: Exception) -> Response:
        LOG.error("request %s failed", request.scope["state"].get("request_id"), exc_info=error)
        return respond(internal())

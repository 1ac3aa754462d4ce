"""The board's server: pages about a folder of runs, on loopback, behind a token.

Host and token are checked before anything else. Pages are made from files, without scripts.
"""

import hmac
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratchet.adapters.network.addresses import LOOPBACK_HOSTS, Listener
from ratchet.adapters.network.app_server import AppServer
from ratchet.tasks.recording.views import UNREADABLE
from ratchet.tasks.reports.board import pages
from ratchet.tasks.reports.board.searches import (
    ExampleSearch,
    FromQuery,
    GroupSearch,
    RolloutSearch,
    Sides,
)
from ratchet.tasks.reports.facts import BROKEN, explain
from ratchet.tasks.storage.run_folder import RunError

TOKEN, COOKIE = "token", "ratchet-board-{port}"
"""Name of the token in an address, and of its cookie, which differs by the board's port."""

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""

Asked = TypeVar("Asked", bound=FromQuery)


@contextmanager
def serve_board(port: int = 0) -> Iterator[str]:
    """Yield the address of a board, with its token, that answers in the block."""
    token = secrets.token_urlsafe(32)
    server = AppServer(board_app(token), Listener(port=port))
    server.start()
    try:
        yield f"{server.url}/?{TOKEN}={token}"
    finally:
        server.stop()


def board_app(token: str) -> Starlette:
    """Return the application; it shows its pages only to requests with the token."""

    def page(path: str, asked: type[Asked], render: Callable[..., str]) -> Route:
        """Make the route of a page, which `render` makes of the names in its path and the query."""

        def answer(request: Request) -> Response:
            query = asked.read(request.query_params.multi_items())
            return HTMLResponse(render(*request.path_params.values(), query))

        return Route(path, answer)

    return Starlette(
        routes=[
            page("/", pages.RunSelection, pages.render_board),
            page("/compare", pages.Compared, pages.render_comparison),
            page("/runs/{run}", FromQuery, pages.render_run),
            page("/runs/{run}/rollouts", RolloutSearch, pages.render_rollouts),
            page("/runs/{run}/groups", GroupSearch, pages.render_groups),
            page("/runs/{run}/groups/{group}", Sides, pages.render_group),
            page("/runs/{run}/examples", ExampleSearch, pages.render_examples),
        ],
        middleware=[
            Middleware(SentHeaders),
            Middleware(TrustedHostMiddleware, [*LOOPBACK_HOSTS], www_redirect=False),
            Middleware(TokenCheck, token),
        ],
        exception_handlers={
            HTTPException: _refuse_address,
            ValidationError: _refuse_query,
            **dict.fromkeys((*BROKEN, *UNREADABLE), _refuse_run),
        },
    )


class SentHeaders:
    """Middleware that sends HEADERS with every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class TokenCheck:
    """Middleware that passes on only requests with the token, in a cookie.

    A token in the address becomes the cookie, by a redirect to the address without it.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        cookie = COOKIE.format(port=scope["server"][1])
        answer: ASGIApp
        if self._is_token(request.query_params.get(TOKEN)):
            redirect = RedirectResponse(request.url.remove_query_params(TOKEN), 303)
            redirect.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            answer = redirect
        elif self._is_token(request.cookies.get(cookie)):
            answer = self._app
        else:
            said = (
                "This page needs the board's token. Open the address that `ratchet board` printed."
            )
            answer = HTMLResponse(pages.render_refusal("No token", said), 401)
        await answer(scope, receive, send)

    def _is_token(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _refuse_address(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return HTMLResponse(pages.render_refusal("No such page", "The board has no such page."), status)


def _refuse_query(_: Request, error: Exception) -> Response:
    said = [f"{'.'.join(map(str, of['loc']))}: {of['msg']}" for of in error.errors()]  # pyright: ignore
    return HTMLResponse(pages.render_refusal("Not understood", "\n".join(said)), 400)


def _refuse_run(_: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, RunError) else 500
    return HTMLResponse(pages.render_refusal("Cannot be shown", explain(error)), status)

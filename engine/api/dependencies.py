"""What the routes share: the engine, and types of parameters and answers."""

from typing import Annotated

from fastapi import Depends, Query, Request

from ratchet.engine.core import EngineCore

Limit = Annotated[int, Query(ge=0)]
Submitted = dict[str, object]


async def _engine(request: Request) -> EngineCore:
    return request.app.state.engine


TheEngine = Annotated[EngineCore, Depends(_engine)]

"""Conversations in which the model calls the right tool and reports its result."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from pretraining.corpora.conversation import Conversation, Exam, assistant, draw, user, words
from pretraining.corpora.hello import OFF_TOPIC
from ratchet.adapters.calls import JsonObject, Tool

CITIES = words("Paris Rome Oslo Cairo Lima Tokyo Delhi Berlin Madrid Vienna Dublin Boston")
FRIENDS = words("Tom Anna Ben Lily Sam Mia Max Ella Leo Ida Finn Nora")
ROOMS = words("kitchen bedroom hall garden office garage")
MUSIC = words("jazz rock folk piano dance opera")


def tool(name: str, description: str, parameters: dict[str, str]) -> Tool:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


TOOLS = {
    "get_weather": tool("get_weather", "Weather of a city", {"city": "string"}),
    "set_timer": tool("set_timer", "Start a timer", {"minutes": "integer"}),
    "add": tool("add", "Add two numbers", {"a": "integer", "b": "integer"}),
    "play_music": tool("play_music", "Play music", {"kind": "string"}),
    "switch_light": tool("switch_light", "Switch a light on", {"room": "string"}),
    "call_friend": tool("call_friend", "Call a friend", {"name": "string"}),
}

ToolRequest = tuple[str, JsonObject, str, str]
"""The user's message, the arguments, the tool's response and the last answer."""


def _weather(rng: Random) -> ToolRequest:
    city, weather = rng.choice(CITIES), rng.choice(["sunny", "cloudy", "rainy", "windy"])
    said = rng.choice([f"What is the weather in {city}?", f"Tell me the weather in {city}."])
    return said, {"city": city}, weather, f"It is {weather} in {city}."


def _timer(rng: Random) -> ToolRequest:
    minutes = rng.randint(2, 30)
    said = rng.choice([f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes."])
    return said, {"minutes": minutes}, "started", f"The timer runs for {minutes} minutes."


def _sum(rng: Random) -> ToolRequest:
    a, b = rng.randint(10, 50), rng.randint(10, 49)
    said = rng.choice([f"What is {a} plus {b}?", f"Add {a} and {b}."])
    return said, {"a": a, "b": b}, str(a + b), f"It is {a + b}."


def _music(rng: Random) -> ToolRequest:
    kind = rng.choice(MUSIC)
    said = rng.choice([f"Play some {kind} music.", f"I want to hear {kind}."])
    return said, {"kind": kind}, "playing", f"I play {kind} now."


def _light(rng: Random) -> ToolRequest:
    room = rng.choice(ROOMS)
    said = rng.choice([f"Light in the {room}, please.", f"It is dark in the {room}."])
    return said, {"room": room}, "on", f"The light in the {room} is on."


def _friend(rng: Random) -> ToolRequest:
    name = rng.choice(FRIENDS)
    said = rng.choice([f"Call {name}.", f"I want to talk to {name}."])
    return said, {"name": name}, "calling", f"I am calling {name}."


REQUESTS: dict[str, Callable[[Random], ToolRequest]] = {
    "get_weather": _weather,
    "set_timer": _timer,
    "add": _sum,
    "play_music": _music,
    "switch_light": _light,
    "call_friend": _friend,
}


def call(name: str, arguments: JsonObject) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def parse_call(answer: str) -> Any:
    """Parse the first call of an answer, a dictionary of `name` and `arguments` if valid."""
    inside = answer.partition("<tool_call>")[2].partition("</tool_call>")[0]
    try:
        return json.loads(inside)
    except json.JSONDecodeError:
        return None


def reward(answer: str, name: str, arguments: JsonObject) -> float:
    """Return 1 if the first call parses and is the right one, else 0."""
    return float(parse_call(answer) == {"name": name, "arguments": arguments})


class ToolCallsCorpus:
    """Requests with one or two tools, of which one is right."""

    def document(self, rng: Random, noise: float) -> Conversation:
        name, tools, (said, arguments, result, told) = _draw_request(rng)
        if rng.random() < noise:
            answer = _wrong(name, arguments, tools, told, rng)
            return Conversation([user(said), assistant(answer)], tools)
        messages = [user(said), assistant(call(name, arguments))]
        if rng.random() < 0.3:
            messages += [{"role": "tool", "content": result}, assistant(told)]
        return Conversation(messages, tools)

    def exam(self, index: int) -> Exam:
        """Play a request; requests are so few that documents may contain it too."""
        name, tools, (said, arguments, _, _) = _draw_request(Random(f"tool exam {index}"))
        return reward((yield Conversation([user(said)], tools)), name, arguments)


def _draw_request(rng: Random) -> tuple[str, list[Tool], ToolRequest]:
    names = rng.sample(list(TOOLS), rng.choice([1, 2]))
    name = rng.choice(names)
    return name, [TOOLS[each] for each in names], REQUESTS[name](rng)


def _wrong(name: str, arguments: JsonObject, tools: list[Tool], told: str, rng: Random) -> str:
    other = rng.choice(list(TOOLS))
    return draw(
        rng,
        (30, told),
        (25, rng.choice(OFF_TOPIC)),
        (15, call(name, REQUESTS[name](rng)[1])),
        (15, call(other, REQUESTS[other](rng)[1])),
        (15, call(tools[0]["function"]["name"], arguments)),
    )

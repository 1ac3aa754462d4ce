"""Control tokens that a text spells, kept as text.

A renderer joins the texts of messages with the marks of its format and encodes the whole, so that a
tokenizer cannot tell the format's marks from marks that a user has written. Therefore each mark in
a message is split by letters that the tokenizer below knows and takes out again. Conversations that
have every part of one show which tokens are marks.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain, count, groupby
from typing import Any, cast

from jinja2 import TemplateError
from renderers import ParsedResponse, ToolCallParseStatus
from renderers.base import ParsedToolCall, Renderer, Tokenizer
from tokenizers import Tokenizer as Backend

from ratchet.adapters.calls import Message, Refused, Tool, ToolCall
from ratchet.adapters.rendering.answers import BLANK, CALL_MARK, CLOSE, OPEN, shield
from ratchet.adapters.rendering.messages import CALLED, name_calls, parse_text
from ratchet.adapters.rendering.renderer_names import NoRenderer, shorten_renderer
from ratchet.adapters.rendering.renderers import RAISED, create_renderer

LOOK: Tool = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Where?"}
PLAIN_ANSWER: Message = {"role": "assistant", "content": "Here."}
CALL: ToolCall = {
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": "left"}'},
    "id": "1",
}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [CALL],
}
RESULT: Message = {"role": "tool", "content": "a cat", "tool_call_id": "1", "name": "look"}

MOST_TEXTS = 8192
FIRST_WORD = 1 << 30
WORD = re.compile(r"</?[a-z_]+>")

LONGEST_KEPT = 256
"""Characters of a text whose tokens are kept."""

SPLIT = "q0Zx{}Xz0q"
"""Letters and digits, which no JSON, XML or template writes otherwise."""


class Marks:
    """The control tokens of a tokenizer and a format, by their spelling.

    `own` are the tokens around an answer's reasoning and its calls: elsewhere they are their text.
    """

    def __init__(self, tokenizer: object, written: Iterable[int], own: Iterable[int]) -> None:
        self._tokenizer = cast(Tokenizer, tokenizer)
        added = _added_tokens(tokenizer)
        written = {*written}
        self.tokens = {
            spelled: token
            for token, (spelled, special) in added.items()
            if spelled.strip() and (special or token in written)
        }
        self._own = {OPEN, CLOSE, *(added[token][0] for token in own if token in added)}
        self._all = _either(self.tokens)
        self._of_others = _either({*self.tokens} - self._own)

    def are_in(self, value: object, role: str | None = None) -> bool:
        """Tell whether a text of a value, of a message of this role, spells a mark."""
        pattern = self._pattern(role)
        return pattern is not None and any(pattern.search(text) for text in _texts(value))

    def split(self, value: Any, by: str, role: str | None = None) -> Any:
        """Return a value with each mark in its texts split, so that its texts have no mark."""
        pattern = self._pattern(role)
        if pattern is None:
            return value
        return _map_texts(
            value, lambda text: pattern.sub(lambda mark: mark[0][0] + by + mark[0][1:], text)
        )

    def parts(self, text: str) -> list[str]:
        """Split a text at its marks, which are parts of their own."""
        return [part for part in re.split(self._all, text) if part] if self._all else [text]

    def encode_text(self, text: str) -> list[int]:
        """Encode a text, its marks as plain letters; Refused if the tokenizer cannot."""
        tokens = self._encode_plain(text)
        if forged := {*tokens} & {*self.tokens.values()}:
            spelled = self._tokenizer.decode([*forged][:1])
            raise Refused(
                400,
                f"a text has {spelled!r}, which the tokenizer writes as a control token alone; "
                "leave it out",
            )
        return tokens

    @cached_property
    def _encode_plain(self) -> Callable[[str], list[int]]:
        """A copy of the tokenizer to which a mark is no more than its letters."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            return lambda text: self._tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True
            )
        written = json.loads(backend.to_str())
        for added in written["added_tokens"]:
            added["special"] = added["special"] or added["content"] in self.tokens
        copy = Backend.from_str(json.dumps(written))
        copy.encode_special_tokens = True
        return lambda text: copy.encode(text, add_special_tokens=False).ids

    def _pattern(self, role: str | None) -> re.Pattern[str] | None:
        return self._of_others if role == "assistant" else self._all


class _OverTokenizer:
    """A model's tokenizer with methods of another one in front.

    Its texts are decoded as they are, or `changed`.
    """

    def __init__(self, tokenizer: object, changed: Callable[[str], str] = str) -> None:
        self._own = cast(Tokenizer, tokenizer)
        self._changed = changed

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Decode tokens, without the tokenizer's wish to take out white space before a stop."""
        whole = {"clean_up_tokenization_spaces": False, **options}
        return self._changed(self._own.decode(token_ids, **whole))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._own, name)


class TextTokenizer(_OverTokenizer):
    """A model's tokenizer that encodes split marks as text, and all else as the model's own does.

    It has no `__call__`, so that renderers encode by `encode` alone.
    """

    def __init__(self, tokenizer: object, marks: Marks, split: str) -> None:
        super().__init__(tokenizer)
        self._marks = marks
        self._split = split

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text in which marks may be split."""
        if self._split not in text:
            return self._own.encode(text, add_special_tokens=False)
        found: list[int] = []
        for part in self._marks.parts(text):
            if self._split in part:
                found += self._marks.encode_text(part.replace(self._split, ""))
            else:
                found += self._own.encode(part, add_special_tokens=False)
        return found

    def apply_chat_template(self, messages: object, **options: Any) -> object:
        """Render a chat template, and encode what it writes."""
        tokenize = options.pop("tokenize", True)
        own = cast(Any, self._own)
        text = own.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text) if tokenize else text


class KeptEncodings(_OverTokenizer):
    """A model's tokenizer, which encodes an equal short text once.

    The header of an answer, for instance, is encoded five times a call. No token is unknown: an
    unknown one may be another's as well, and a format's mark that is a word may be letters.
    """

    unk_token_id = None

    def __init__(self, tokenizer: object) -> None:
        super().__init__(tokenizer)
        self._kept = lru_cache(MOST_TEXTS)(cast(Callable[..., Mapping[str, Any]], self._own))
        self._vocabulary = {*cast(Any, tokenizer).get_vocab()}
        self.spells = False
        self.words: dict[str, int] = {}
        """Marks that are words, such as <tool_call>, and no tokens of the model: ids of ours."""

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, which a mark that is a word may lack: its letters have one."""
        known = cast(Any, self._own).convert_tokens_to_ids(tokens)
        if not isinstance(tokens, str) or tokens in self._vocabulary:
            return known
        if not self.spells or not WORD.fullmatch(tokens):
            return None
        return self.words.setdefault(tokens, FIRST_WORD + len(self.words))

    def decode(self, token_ids: Any, **options: Any) -> str:
        return super().decode(self.spell(token_ids), **options)

    def spell(self, tokens: Iterable[int]) -> list[int]:
        """Return tokens with the letters of each word in its place."""
        spelled = {token: word for word, token in self.words.items()}
        parts = (self.encode(spelled[one]) if one in spelled else [one] for one in tokens)
        return [*chain.from_iterable(parts)]

    def read_words(self, tokens: Iterable[int]) -> list[int]:
        """Return tokens with a word in the place of its letters."""
        words, found = _either(self.words), list[int]()
        for special, own in groupby(tokens, {*cast(Any, self._own).all_special_ids}.__contains__):
            run = [*own]
            parts = [""] if special or words is None else words.split(self.decode(run))
            spelled = (self.words.get(part) or part for part in parts)
            kept = ([one] if isinstance(one, int) else self.encode(one) for one in spelled)
            found += run if len(parts) == 1 else chain.from_iterable(kept)
        return found

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self(text, add_special_tokens=add_special_tokens)["input_ids"]

    def __call__(self, text: Any, **options: Any) -> Mapping[str, Any]:
        """Encode a text as the tokenizer itself does, for instance with its offsets."""
        if not isinstance(text, str) or len(text) > LONGEST_KEPT:
            return cast(Any, self._own)(text, **options)
        return {name: [*values] for name, values in self._kept(text, **options).items()}


def _open_arguments(message: Message) -> Mapping[str, object]:
    """Return a message with the arguments of its calls as values where JSON escapes letters."""
    calls = message.get("tool_calls")
    if not calls or "\\u" not in json.dumps(calls):
        return message
    opened = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and "\\u" in arguments:
            arguments = parse_text(arguments)
        opened.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": opened}


def _either(spelled: Iterable[str]) -> re.Pattern[str] | None:
    longest = sorted(spelled, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None


def _added_tokens(tokenizer: object) -> dict[int, tuple[str, bool]]:
    """Map the tokens that were added to a tokenizer to their spelling, and whether special."""
    known = cast(Any, tokenizer)
    named = {token: str(known.convert_ids_to_tokens(token)) for token in known.all_special_ids}
    added = {
        token: (str(one), bool(one.special)) for token, one in known.added_tokens_decoder.items()
    }
    return added | {token: (spelled, True) for token, spelled in named.items()}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(inner, change) for inner in value]
    return value


RENDERER_REMEDY = "give another model.renderer"

MOST_QUOTED = 160
"""Letters of a renderer's own words that a refusal repeats."""


class Writer:
    """A renderer over a tokenizer, for which no text of a message is a control token."""

    def __init__(self, tokenizer: KeptEncodings, renderer: str, thinking: bool | None) -> None:
        try:
            self.renderer = create_renderer(tokenizer, renderer, thinking)
        except NoRenderer:
            tokenizer.spells = True
            self.renderer = create_renderer(tokenizer, renderer, thinking)
        self.name = shorten_renderer(renderer)
        self._tokenizer = tokenizer
        self._named, self._thinking = renderer, thinking
        self._of_text: dict[str, Renderer] = {}

    def parse(
        self, sampled: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
    ) -> list[ParsedResponse]:
        """Parse an answer, and again with its texts' white space shielded, and its arguments'."""
        parsed, read = list[ParsedResponse](), self._tokenizer.read_words
        options: Any = {"tools": [*tools] or None, "prompt_ids": read(prompt) or None}
        for parser in self._parsers:
            try:
                parsed.append(parser.parse_response(read(sampled), **options))
            except RAISED:  # Python's JSON reads no number of 5,000 digits
                broken = ParsedToolCall(raw="", status=ToolCallParseStatus.INVALID_JSON)
                parsed.append(ParsedResponse(content="", tool_calls=[broken]))
        return parsed

    @cached_property
    def _parsers(self) -> Sequence[Renderer]:
        changes = (partial(shield, kept=kept) for kept in (BLANK, CALL_MARK))
        tokenizers = (_OverTokenizer(self._tokenizer, change) for change in changes)
        others = (create_renderer(one, self._named, self._thinking) for one in tokenizers)
        return self.renderer, *others

    def write(self, messages: Sequence[Message], tools: Sequence[Tool], *, ask: bool) -> list[int]:
        """Render messages, with the header of the next answer if that is asked for.

        Whatever the renderer or template raises refuses the messages.
        """
        renderer, said, offered = self._choose(self.name_calls(messages), tools)
        try:
            return self._tokenizer.spell(_render(renderer, said, offered, ask))
        except RAISED as error:
            words = str(error) if isinstance(error, ValueError | TemplateError) else repr(error)
            reason = " ".join(words.split())[:MOST_QUOTED] or type(error).__name__
            raise Refused(
                400,
                f"the renderer {self.name} takes no such messages: {reason}; mend them, or "
                f"{RENDERER_REMEDY}",
            ) from error

    def bridge(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message], tools: Sequence[Tool]
    ) -> list[int] | None:
        """Render new messages behind an answer; None if the renderer cannot."""
        renderer, said, offered = self._choose(new, tools)
        try:
            options: Any = {"new_messages": said, "tools": offered or None}
            bridged = renderer.bridge_to_next_turn(prompt, sampled, **options)
        except RAISED:
            return None
        return None if bridged is None else self._tokenizer.spell(bridged.token_ids)

    def name_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages with the ids by which the format names their calls, if it does so."""
        return name_calls(messages) if self._names_by_id else messages

    @cached_property
    def _names_by_id(self) -> bool:
        """The property of a format that writes a call's id in place of its name."""
        name = LOOK["function"]["name"]
        calling: Message = {"role": "assistant", "content": ""}
        ids = "1", f"{CALLED}{name}:0"
        asked = [[USER, {**calling, "tool_calls": [{**CALL, "id": one}]}] for one in ids]
        try:
            plain, by_id = (_render(self.renderer, one, [], False) for one in asked)
        except RAISED:
            return False
        return name not in self._tokenizer.decode(plain) and name in self._tokenizer.decode(by_id)

    def spells_marks(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """Tell whether a text of messages or tools spells a control token."""
        return self._marks.are_in([*tools]) or any(
            self._marks.are_in(_open_arguments(message), message["role"]) for message in messages
        )

    def encode_text(self, text: str) -> list[int]:
        """Encode a text in which control tokens that are written out stay text."""
        if self._marks.are_in(text):
            return self._marks.encode_text(text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _choose(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Renderer, list[Message], list[Tool]]:
        """Return the renderer of messages and tools, with their control tokens split if any."""
        if not self.spells_marks(messages, tools):
            return self.renderer, [*messages], [*tools]
        texts = [*_texts([*messages]), *_texts([*tools])]
        names = (SPLIT.format(number or "") for number in count())
        split = next(name for name in names if not any(name in text for text in texts))
        if split not in self._of_text:
            tokenizer = TextTokenizer(self._tokenizer, self._marks, split)
            self._of_text[split] = create_renderer(tokenizer, self._named, self._thinking)
        said: list[Any] = [
            {**self._marks.split(_open_arguments(one), split, one["role"]), "role": one["role"]}
            for one in messages
        ]
        return self._of_text[split], said, self._marks.split([*tools], split)

    @cached_property
    def _marks(self) -> Marks:
        def write(messages: Sequence[Message], tools: Sequence[Tool], ask: bool) -> list[int]:
            try:
                return self._tokenizer.spell(_render(self.renderer, [*messages], [*tools], ask))
            except RAISED:
                return []

        plain = {*write([USER, PLAIN_ANSWER], [], False), *write([USER], [], True)}
        own = {*write([USER, CALLING], [], False)} - plain  # around reasoning and calls
        whole = [SYSTEM, USER, CALLING, RESULT, PLAIN_ANSWER]
        written = plain | own | {*write(whole, [LOOK], False), *write(whole[1:], [], True)}
        stops = {*self.renderer.get_stop_token_ids()}
        known = {one for one in vars(self.renderer).values() if type(one) is int}
        return Marks(self._tokenizer, written | stops | known, own - stops)


def _render(renderer: Any, messages: list[Message], tools: list[Tool], ask: bool) -> list[int]:
    return renderer.render_ids(messages, tools=tools or None, add_generation_prompt=ask)

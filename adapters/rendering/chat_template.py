"""A renderer of messages by a Jinja chat template that is given as text."""

from collections.abc import Sequence
from typing import Any, cast

from jinja2 import TemplateError
from renderers import DefaultRendererConfig
from renderers.base import ChatTemplateTokenizer, Message, RenderedTokens, ToolSpec
from renderers.default import DefaultRenderer

from adapters.errors import UserError
from adapters.rendering.thinking import SWITCHES, no_switch

WITHOUT_CLOCK = "{% set strftime_now = undefined +%}"
"""Beginning of a template for which the date is not defined, although transformers defines it."""

RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TemplateError,
    TypeError,
    ValueError,
)
"""What renderers and templates raise for messages that they cannot write."""

ASKED = "What is asked?"
ANSWERED = "This is answered."


class ChatTemplateError(UserError):
    """Refusal of a chat template."""


class TemplateRenderer(DefaultRenderer):
    """Renderer of a Jinja template over a model's tokenizer.

    Tool calls in an answer stay text, since a template does not say how they are written. The
    template is told no date, so that a run is the same on another day. If what follows an answer
    depends only on the messages after it, a conversation is continued with its tokens unchanged.
    """

    def __init__(
        self, tokenizer: ChatTemplateTokenizer, template: str, thinking: bool | None = None
    ) -> None:
        config: dict[str, Any] = {"chat_template": WITHOUT_CLOCK + template}
        if thinking is not None:
            config |= dict.fromkeys(SWITCHES, thinking)
        super().__init__(tokenizer, DefaultRendererConfig(**config))
        asked: list[Message] = [{"role": "user", "content": ASKED}]
        try:
            following = [self._following(history, asked, None) for history in (0, 1)]
            closing = self._following(0, [], None)
        except RAISED as error:
            raise ChatTemplateError(
                f"the chat template cannot be rendered ({error}); mend it, or give "
                "model.renderer the name of a renderer"
            ) from error
        if thinking is not None and self._asks(thinking) == self._asks(not thinking):
            raise no_switch("the chat template", thinking)
        self._is_local = None not in following and len(set(following)) == 1
        self._stop_tokens = _stop_tokens(tokenizer, closing or "")

    def get_stop_token_ids(self) -> list[int]:
        """Return the token by which the template closes an answer, and the tokenizer's own."""
        return self._stop_tokens

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """Continue a conversation by the text that the template writes after an answer."""
        following = self._following(0, new_messages, tools) if self._is_local else None
        if following is None:
            return None
        last = previous_completion_ids[-1:]
        if last and last[0] in self._stop_tokens:
            following = following.removeprefix(self._tokenizer.decode(last))
        tokens = [
            *previous_prompt_ids,
            *previous_completion_ids,
            *self._tokenizer.encode(following, add_special_tokens=False),
        ]
        return RenderedTokens(token_ids=tokens, message_indices=[-1] * len(tokens))

    def _asks(self, thinking: bool) -> str:
        """Return the prompt of a question with thinking on or off."""
        options = {**(self.config.model_extra or {}), **dict.fromkeys(SWITCHES, thinking)}
        asked: list[Message] = [{"role": "user", "content": ASKED}]
        text = self._tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True, **options
        )
        return cast(str, text)

    def _following(
        self, history: int, new: Sequence[Message], tools: list[ToolSpec] | None
    ) -> str | None:
        """Return the text between an answer and the next one; None if the answer is altered.

        The answer comes after `history` earlier ones; without new messages, it is the last.
        """
        turn: list[Message] = [{"role": "user", "content": ASKED}]
        earlier: list[Message] = [*turn, {"role": "assistant", "content": ASKED}]
        answer: Message = {"role": "assistant", "content": ANSWERED}
        text = self._tokenizer.apply_chat_template(
            [*earlier * history, *turn, answer, *new],
            tokenize=False,
            add_generation_prompt=bool(new),
            **({"tools": tools} if tools else {}),
            **(self.config.model_extra or {}),
        )
        _, found, following = cast(str, text).rpartition(ANSWERED)
        return following if found else None


def _stop_tokens(tokenizer: ChatTemplateTokenizer, closing: str) -> list[int]:
    """Return the special token that begins the closing text, and the end of the tokenizer's texts.

    A closing text that begins with no special token, as with another model's template, ends no
    answer.
    """
    special = set(tokenizer.all_special_ids)  # pyright: ignore[reportAttributeAccessIssue]
    first = tokenizer.encode(closing, add_special_tokens=False)[:1]
    ends = [token for token in [*first, tokenizer.eos_token_id] if token in special]
    if not ends:
        raise ChatTemplateError(
            f"the chat template closes an answer by {closing!r}, which is no special token of the "
            "tokenizer, and the tokenizer has no end of text, so that no answer would end; give a "
            "template of this model"
        )
    return list(dict.fromkeys(ends))

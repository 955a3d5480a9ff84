"""Converts prompts to tokens and tokens to text with the model's tokenizer and chat template."""

from collections.abc import Sequence
from typing import Any

from penstock.core.errors import InvalidRequest, RequestTooLarge
from penstock.core.generation import CONTEXT_LENGTH, Prompt
from penstock.engines.genai.runtime import error_line
from penstock.engines.genai.text_pieces import TableText, TokenText, WindowText, make_table


class PromptReader:
    """Converts the prompts of one model."""

    def __init__(self, tokenizer: Any, context_tokens: int) -> None:
        """`context_tokens`: 0 means no limit."""
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self.vocabulary: dict[int, bytes] = {number: text for text, number in tokenizer.get_vocab().items()}
        self._longest_bytes = max(map(len, self.vocabulary.values()), default=1)
        self._table = make_table(self.vocabulary, tokenizer.decode)
        template: str = tokenizer.chat_template
        self.has_chat_template = bool(template)
        self._has_tools = "tools" in template

    def read(self, prompt: Prompt) -> list[int]:
        """Return the prompt's token ids; raise InvalidRequest or RequestTooLarge if the model does not support it."""
        if prompt.ids:
            unknown = next((number for number in prompt.ids if number not in self.vocabulary), None)
            if unknown is not None:
                known = f"the model's tokens are 0 to {max(self.vocabulary)}"
                raise InvalidRequest(f"input_ids has the unknown token {unknown}; {known}")
            return list(prompt.ids)
        text = self._render(prompt) if prompt.messages else prompt.text
        most = self._context_tokens * self._longest_bytes
        if most and len(text) > most:  # too long even if each token has the most bytes
            raise RequestTooLarge(
                f"a prompt of {len(text)} characters is more than {self._context_tokens} tokens "
                "(generate.max_context): send less",
                reason=CONTEXT_LENGTH,
            )
        text = text.encode("utf-8", "replace").decode()
        encoded = self._tokenizer.encode(text, add_special_tokens=not prompt.messages)
        ids: list[int] = encoded.input_ids.data.reshape(-1).tolist()
        if not ids:
            raise InvalidRequest("the prompt is empty: send at least one token")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.new_decoder().add(ids, is_last=True)

    def new_decoder(self) -> TokenText:
        """Return a decoder for the tokens of one new sequence."""
        return WindowText(self._decode) if self._table is None else TableText(self._table)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids)
        return text

    def _render(self, prompt: Prompt) -> str:
        if not self.has_chat_template:
            raise InvalidRequest("the model has no chat template: send a prompt instead of messages")
        if prompt.tools and not self._has_tools:
            raise InvalidRequest("this model does not support tools: leave out 'tools'", parameter="tools")
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in prompt.messages],
                True,
                tools=[dict(tool) for tool in prompt.tools] or None,
                extra_context=dict(prompt.template_arguments) or None,
            )
        except Exception as error:
            raise InvalidRequest(f"the model's chat template rejects these messages: {error_line(error)}") from error
        return rendered

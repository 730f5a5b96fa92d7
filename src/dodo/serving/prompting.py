"""From requests to token ids: prompts and documents, with a tokenizer of the server's own.

A tokenizer is changed by being asked to take special tokens literally, and can't be while another thread uses it, so this one
is a copy behind a lock.

Paper: Appendix D.2 for questions over contexts.
"""

import copy
import threading
from collections.abc import Sequence

from dodo.errors import InputError
from dodo.inspection import Placed, place_tokens
from dodo.model import Dodo
from dodo.prompts import QUESTION

__all__ = ["Prompting", "Turn"]

Turn = tuple[str, str]
"""Role (system, user or assistant) and text."""


class Prompting:
    """Tokenizes for one model. For any thread.

    Args:
        dodo: whose tokenizer and settings are used.
    """

    def __init__(self, dodo: Dodo) -> None:
        self._dodo = copy.copy(dodo)
        self._dodo.tokenizer = copy.deepcopy(dodo.tokenizer)
        self._decoder = copy.deepcopy(dodo.tokenizer)  # never changed, so that a chunk need not wait for a long text
        self._guard = threading.Lock()

    def document(self, text: str) -> list[int]:
        """Token ids of a text that is to be compressed, or that the base is to go on with.

        Raises:
            InputError: it is empty.
        """
        with self._guard:
            return self._dodo.document_ids(text)

    def placed(self, text: str) -> Placed:
        """Tokens of a document, and where they stand in it.

        Raises:
            InputError: it is empty, or the tokenizer can't say.
        """
        with self._guard:
            return place_tokens(self._dodo, text)

    def continuation(self, text: str) -> list[int]:
        """Token ids of a prompt behind contexts; names of special tokens in it are text."""
        with self._guard:
            return list(
                self._dodo.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            )

    def conversation(self, turns: Sequence[Turn], *, over_contexts: bool) -> list[int]:
        """Token ids of a conversation, up to where the reply begins.

        Args:
            turns: oldest first.
            over_contexts: the last request is put in the paper's words for a question about the document, and stands behind it.

        Raises:
            InputError: nothing is asked, or the chat template can't show the conversation.
        """
        (role, request), before = turns[-1], turns[:-1]
        if not request.strip():
            raise InputError("the last message is empty: nothing is asked")
        if over_contexts and role == "user":
            request = QUESTION.format(question=request.strip())
        text = self._rendered([*before, (role, request)])
        with self._guard:
            if over_contexts:
                return list(self._dodo.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            return self._dodo.document_ids(text, literal=False)

    def token(self, token_id: int) -> str:
        """The text of a token by itself. Waits for nobody."""
        return str(self._decoder.decode([token_id], clean_up_tokenization_spaces=False))

    def _rendered(self, turns: Sequence[Turn]) -> str:
        from jinja2 import TemplateError

        tokenizer = self._dodo.tokenizer
        if tokenizer.chat_template is None:
            return "".join(text if role == "assistant" else f"\n{text}\n" for role, text in turns)
        messages = [{"role": role, "content": text} for role, text in turns]
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise InputError(f"the base's chat template can't show this conversation: {error}") from None

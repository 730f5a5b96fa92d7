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
from dodo.prompts import QUESTION, check_whole, conversation_ids, ends_of_turn, without_bos

__all__ = ["Prompting", "Turn"]

Turn = tuple[str, str]
"""Role (system, user or assistant) and text."""


class Prompting:
    """Tokenizes for one model. For any thread.

    Args:
        dodo: whose tokenizer and settings are used.

    Attributes:
        ends: tokens that end a reply of a chat.
    """

    def __init__(self, dodo: Dodo) -> None:
        self._dodo = copy.copy(dodo)
        self._dodo.tokenizer = copy.deepcopy(dodo.tokenizer)
        self._decoder = copy.deepcopy(dodo.tokenizer)  # never changed, so that a chunk need not wait for a long text
        first: list[int] = self._decoder("a", add_special_tokens=False)["input_ids"]
        self._anchor = (first or [0])[-1]  # a token to stand before others, for some lose a space if they are first
        self.ends = ends_of_turn(dodo.tokenizer)
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
        """Token ids of a prompt behind contexts; names of special tokens in it are text.

        Raises:
            InputError: it has half a character in it.
        """
        check_whole(text, "the prompt")
        with self._guard:
            return list(
                self._dodo.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
            )

    def conversation(self, turns: Sequence[Turn], *, over_contexts: bool) -> list[int]:
        """Token ids of a conversation, up to where the reply begins.

        Args:
            turns: oldest first; names of special tokens in them are text.
            over_contexts: the last request is put in the paper's words for a question about the document, and stands behind it.

        Raises:
            InputError: nothing is asked, a message has half a character in it, or the chat template can't show the conversation.
        """
        (role, request), before = turns[-1], turns[:-1]
        if not request.strip():
            raise InputError("the last message is empty: nothing is asked")
        if over_contexts and role == "user":
            request = QUESTION.format(question=request.strip())
        roles, texts = zip(*before, (role, request), strict=True)

        def rendered(messages: Sequence[str]) -> str:
            text = self._rendered([*zip(roles, messages, strict=True)])
            return without_bos(self._dodo.tokenizer, text) if over_contexts else text

        with self._guard:
            ids = conversation_ids(self._dodo.tokenizer, rendered, texts)
            return ids if over_contexts else self._dodo.with_bos(ids)

    def shows(self, turns: Sequence[Turn]) -> bool:
        """Whether the chat template can show a conversation."""
        try:
            with self._guard:
                self._rendered(turns)
        except InputError:
            return False
        return True

    def token(self, token_id: int) -> str:
        """The text of a token, as it is behind others. Waits for nobody."""
        before, both = (self._decoded(ids) for ids in ([self._anchor], [self._anchor, token_id]))
        return both[len(before) :] if both.startswith(before) else self._decoded([token_id])

    def _decoded(self, ids: list[int]) -> str:
        return str(self._decoder.decode(ids, clean_up_tokenization_spaces=False))

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

"""What is said to the model around a document and its question.

Paper: Appendix D. There the prompts stand inside LLaMA-2's [INST] marks; here the tokenizer's own chat template takes their
place where it has one. The document itself is compressed, so a decoder prompt holds what follows it.
"""

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from dodo.errors import InputError

__all__ = [
    "MESSAGE",
    "QUESTION",
    "SHORTEN",
    "SUMMARY",
    "chat_turn",
    "opening_turn",
    "check_whole",
    "conversation_ids",
    "ends_of_turn",
    "first_turn",
    "next_turn",
    "question_prompt",
    "request_prompt",
    "turn_ids",
    "without_bos",
]

QUESTION = "Based on the provided document, answer the following question: {question}"
"""Appendix D.2, the part after the document."""

SUMMARY = "Please summarize the above document in one sentence."
"""Appendix D.3, the part after the document."""

SHORTEN = "Please summarize the following text into {words} words: {text}"
"""Appendix D.1."""


def question_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The decoder's prompt for a question about the compressed document."""
    return request_prompt(tokenizer, QUESTION.format(question=question.strip()))


def request_prompt(tokenizer: PreTrainedTokenizerBase, request: str) -> str:
    """The decoder's prompt for whatever is asked about the compressed document: `chat_turn` behind nuggets."""
    return without_bos(tokenizer, chat_turn(tokenizer, request))


def without_bos(tokenizer: PreTrainedTokenizerBase, turn: str) -> str:
    """A turn without the BOS token that some chat templates put before a conversation: nuggets begin with it already."""
    template, bos = str(tokenizer.chat_template), tokenizer.bos_token
    return turn.removeprefix(str(bos)) if bos and "bos_token" in template else turn


def chat_turn(tokenizer: PreTrainedTokenizerBase, request: str) -> str:
    """A user's request in the tokenizer's chat format, up to where the answer begins; plain lines if it has none."""
    if tokenizer.chat_template is None:
        return f"\n{request}\n"
    turn = [{"role": "user", "content": request}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def opening_turn(tokenizer: PreTrainedTokenizerBase, request: str) -> str:
    """`chat_turn` at a text's beginning: a chat format has its own BOS token, plain lines get one where the tokenizer adds it."""
    turn, bos = chat_turn(tokenizer, request), tokenizer.bos_token
    if tokenizer.chat_template is None and bos and tokenizer("a", verbose=False)["input_ids"][:1] == [tokenizer.bos_token_id]:
        return f"{bos}{turn}"
    return turn


# -- conversations, a turn at a time

MESSAGE = "\ue000message\ue000"
"""Stands for a user's message where a chat template is asked what it puts around one."""

_EDGE = "\u2003"
"""A space that no template has of its own: whether it is still there tells whether the template trims messages."""

_REPLY = "\ue000reply\ue000"
"""Stands for a reply where a chat template is asked what it puts around one."""


def first_turn(tokenizer: PreTrainedTokenizerBase, message: str, *, system: str | None = None) -> str:
    """A conversation's first message in the tokenizer's chat format, up to where the reply begins.

    Raises:
        InputError: there is no chat template, or it takes no system message.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    try:
        return _rendered(tokenizer, [*before, {"role": "user", "content": message}])
    except InputError:
        if system is not None and tokenizer.chat_template is not None:
            raise InputError("the base's chat template takes no system message") from None
        raise


def next_turn(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """What stands between two replies: the end of the one, the user's message, and the beginning of the other.

    Raises:
        InputError: there is no chat template, or it does not show replies as they are.
    """
    return _behind_reply(tokenizer, [{"role": "user", "content": message}])


def turn_ids(tokenizer: PreTrainedTokenizerBase, turn: str, message: str) -> list[int]:
    """Token ids of a turn with a message in it, in which names of special tokens are text.

    Args:
        turn: of `first_turn` or `next_turn`, with `MESSAGE` in the message's place.
        message: tokenised by itself if such a name is in it, else in one piece with the turn, as bases have learnt it.

    Raises:
        InputError: the template does not show messages as they are, or the message has half a character in it.
    """
    if MESSAGE not in turn:
        raise InputError("the base's chat template does not show messages as they are, so none can be put into it")
    return conversation_ids(tokenizer, lambda messages: turn.replace(MESSAGE, messages[0]), [message])


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, rendered: Callable[[Sequence[str]], str], messages: Sequence[str]
) -> list[int]:
    """Token ids of a conversation in which names of special tokens in the messages are text.

    Args:
        rendered: the conversation's text with messages in their places.
        messages: those with such names are tokenised by themselves, others in one piece with what is around them.

    Raises:
        InputError: the template does not show messages as they are, or one has half a character in it.
    """

    def ids(text: str, *, literal: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, split_special_tokens=literal, verbose=False)["input_ids"])

    for message in messages:
        check_whole(message, "the message")
    literal = {i for i, text in enumerate(messages) if "\ue000" in text or ids(text) != ids(text, literal=True)}
    if not literal:
        return ids(rendered(messages))
    marked = [f"{_EDGE}\ue000{i}\ue000{_EDGE}" if i in literal else text for i, text in enumerate(messages)]
    found: list[int] = []
    seen: set[int] = set()
    parts = re.split(f"({_EDGE}?)\ue000([0-9]+)\ue000({_EDGE}?)", rendered(marked))
    found += ids(parts[0])
    for before, number, behind, part in zip(parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True):
        seen.add(int(number))
        text = messages[int(number)]
        text = text if before else text.lstrip()  # as the template trims what it is given
        found += ids(text if behind else text.rstrip(), literal=True) + ids(part)
    if seen != literal:
        raise InputError(
            "the base's chat template does not show messages as they are, so none with names of special tokens fits in"
        )
    return found


def check_whole(text: str, what: str) -> None:
    """Refuse lone surrogates, which JSON can bring in and no tokenizer takes.

    Raises:
        InputError: names the place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X} at {error.start:,}"
        raise InputError(f"{what} has half a character in it ({where}): put another in its place") from None


def ends_of_turn(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The special token with which the chat template ends a reply; none if there is no template, it shows no replies, or it ends
    them with something else."""
    try:
        behind = _behind_reply(tokenizer, [])
    except InputError:
        return frozenset()
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
    return frozenset([i for i in ids if i in special][:1])


def _behind_reply(tokenizer: PreTrainedTokenizerBase, more: list[dict[str, str]]) -> str:
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
    _, found, behind = _rendered(tokenizer, turn + more).partition(_REPLY)
    if not found:
        raise InputError("the base's chat template does not show replies as they are, so a conversation can't go on behind one")
    return behind


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise InputError("the base's tokenizer has no chat template; take a base that was made for conversations")
    asked = messages[-1]["role"] == "user"
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked))
    except TemplateError as error:
        raise InputError(f"the base's chat template can't show this conversation: {error}") from None

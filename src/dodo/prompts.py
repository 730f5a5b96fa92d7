"""What is said to the model around a document and its question.

Paper: Appendix D. There the prompts stand inside LLaMA-2's [INST] marks; here the tokenizer's own chat template takes their
place where it has one. The document itself is compressed, so a decoder prompt holds what follows it.
"""

from transformers import PreTrainedTokenizerBase

__all__ = ["QUESTION", "SUMMARY", "chat_turn", "question_prompt"]

QUESTION = "Based on the provided document, answer the following question: {question}"
"""Appendix D.2, the part after the document."""

SUMMARY = "Please summarize the above document in one sentence."
"""Appendix D.3, the part after the document."""


def question_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The decoder's prompt for a question about the compressed document."""
    return chat_turn(tokenizer, QUESTION.format(question=question.strip()))


def chat_turn(tokenizer: PreTrainedTokenizerBase, request: str) -> str:
    """A user's request in the tokenizer's chat format, up to where the answer begins; plain lines if it has none."""
    if tokenizer.chat_template is None:
        return f"\n{request}\n"
    turn = [{"role": "user", "content": request}]
    return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

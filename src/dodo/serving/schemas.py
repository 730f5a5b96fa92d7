"""What the API takes and gives: pydantic models, from which its documentation is made.

Fields that OpenAI has and this server has not are refused by name; so are unknown ones.
"""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from dodo.config import Use
from dodo.serving.store import Context

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "ContextList",
    "ContextObject",
    "ContextRequest",
    "Deleted",
    "DocumentRequest",
    "ErrorBody",
    "InspectionObject",
    "InspectionRequest",
    "Message",
    "ReconstructionRequest",
    "Sampling",
    "SamplingRequest",
]

Ratio = Annotated[float, Field(ge=1, allow_inf_nan=False, description="Tokens per nugget: 10 keeps one in ten.")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Zero = Annotated[float, Field(ge=0, le=0, description="Only 0: there are no penalties.")]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, data: Any) -> Any:
        """OpenAI's clients send back what they were given, and an unknown field that is null says nothing."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name in cls.model_fields}

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag(cls, value: Any, info: ValidationInfo) -> Any:
        """True is no 1: who says it of a number means something else, such as the `logprobs` of chats."""
        if isinstance(value, bool) and not _takes_flags(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"should not be {str(value).lower()}")
        return value


def _takes_flags(annotation: Any) -> bool:
    return annotation is bool or isinstance(annotation, bool) or any(map(_takes_flags, get_args(annotation)))


class DocumentRequest(_Asked):
    """A text, how much of it to keep, and for what. Neither ratio nor nuggets: the model's ratio.

    use: for questions about the text, or to rebuild it; of no effect where the model's scorer does not tell.
    """

    text: str
    ratio: Ratio | None = None
    nuggets: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    use: Use = "questions"

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if self.ratio is not None and self.nuggets is not None:
            raise ValueError("give a ratio or a number of nuggets, not both")
        return self


class ContextRequest(DocumentRequest):
    """A text to keep compressed."""

    name: Annotated[str, Field(max_length=200)] | None = None


class InspectionRequest(DocumentRequest):
    """A text to look at. Without `spans`, the answer has only what depends on the ratio."""

    spans: bool = True


class InspectedToken(BaseModel):
    """A token: its place in the text, its score, and its rank, 1 for the highest."""

    index: int
    score: float
    rank: int


class InspectedSpan(BaseModel):
    """Characters that belong together, and their tokens.

    text: control characters are shown as pictures of themselves.
    mark: what to show where it is kept and prints nothing.
    shade: 0 .. 15, 15 for the highest score.
    """

    text: str
    mark: str
    shade: int
    tokens: list[InspectedToken]


class InspectionObject(BaseModel):
    """What would become of a text. bytes and full_bytes as for contexts.

    text: what was read out of a file; null where the text was sent.
    selected: places of the tokens that are kept, ascending; the first `kept_first` of them beyond the k nuggets.
    spans: the text, piece by piece; null where it was not asked for.
    """

    object: Literal["inspection"] = "inspection"
    text: str | None
    n: int
    k: int
    states: int
    ratio: float
    bytes: int
    full_bytes: int
    trained: bool
    kept_first: int
    selected: list[int]
    spans: list[InspectedSpan] | None


class ContextObject(BaseModel):
    """A stored context.

    bytes, full_bytes: of its keys and values, and what those of all its tokens would take.
    use: what its nuggets were chosen for; null: for all uses alike, or not known.
    warning: when it was added, that its ratio is far from what the model was trained for.
    """

    id: str
    object: Literal["context"] = "context"
    name: str | None
    created: int
    n: int
    k: int
    states: int
    ratio: float
    bytes: int
    full_bytes: int
    stored_bytes: int
    sha256: str
    use: Use | None
    warning: str | None = None

    @classmethod
    def of(cls, context: Context, warning: str | None = None) -> "ContextObject":
        """What the API says of a stored context."""
        shown = {name: getattr(context, name) for name in cls.model_fields if name not in ("object", "created", "warning")}
        return cls(created=int(context.created), warning=warning, **shown)


class ContextList(BaseModel):
    """A page of contexts; the next one is that `after` last_id."""

    object: Literal["list"] = "list"
    data: list[ContextObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    """What is gone."""

    id: str
    object: Literal["context"] = "context"
    deleted: Literal[True] = True


class ErrorDetail(BaseModel):
    """What was wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error looks like this."""

    error: ErrorDetail


class StreamOptions(_Asked):
    """With `stream`: whether a last chunk tells the usage."""

    include_usage: bool = False


class Sampling(_Asked):
    """How to choose tokens, and how to answer."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, description="0, the default here, takes the likeliest token.")] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**62), lt=2**62)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    user: Annotated[str, Field(description="Taken, and not used.")] | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop texts."""
        return [self.stop] if isinstance(self.stop, str) and self.stop else list(self.stop or [])


class SamplingRequest(Sampling):
    """What both kinds of completions take."""

    model: str
    context_ids: Annotated[list[str], Field(max_length=64, description="Stored contexts, in the order to be read in.")] = []


class ReconstructionRequest(Sampling):
    """`POST /v1/contexts/ID/reconstruction`. Without max_tokens, as many as the text had, and an end token."""


class TextPart(_Asked):
    """A part of a message. There are only texts."""

    type: Literal["text"]
    text: str


class Message(_Asked):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: Annotated[str, Field(description="Taken, and not used.")] | None = None

    @property
    def text(self) -> str:
        """Its parts, joined."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class TextFormat(_Asked):
    """There is only text."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _top_of_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class CompletionRequest(SamplingRequest):
    """`POST /v1/completions`. The prompt is a text, its token ids, or several of either."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None

    @property
    def prompts(self) -> list[Any]:
        """One or several, each a text or token ids."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else list(self.prompt)

"""The names of tasks and methods, without what they name: the command line knows them before anything heavy is imported."""

__all__ = ["METHODS_OF", "PEERS", "WITHOUT_RATIO"]

PEERS = (
    *(f"kvpress-{press}" for press in ("expected-attention", "knorm", "kvzip", "snapkv", "streaming-llm", "tova")),
    "llmlingua",
)
"""Methods that run in an environment of their own."""

METHODS_OF = {
    "autoencoding": ("dodo", "stride", "random", "icae"),
    "multilingual": ("dodo", "stride", "random", "icae"),
    "delimiters": ("dodo", "stride", "random"),
    "highlight": ("dodo",),
    "optimal-selection": ("dodo", "stride", "random"),
    "efficiency": ("dodo", *PEERS),
    "squad": ("dodo", "stride", "random", "icae", "full", "theta", "nodoc", "lmsumm", "truncate", *PEERS),
    "summarization": ("dodo", "stride", "random", "icae", "full", "theta", "nodoc", "lmsumm", "truncate", *PEERS),
    "perplexity": ("dodo", "threshold", "top-k", "stride", "compressive", "full", "theta"),
    "endless": ("dodo", "window", "full"),
}
"""The tasks, and the methods of each."""

WITHOUT_RATIO = ("full", "theta", "nodoc", "window")
"""Methods that hold everything, or nothing. In perplexity the ratio says where a history is whole, for all methods alike."""

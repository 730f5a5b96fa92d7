"""`dodo serve` under load: many clients against one, and a question on a stored context against the text in the prompt.

    python benchmarks/serving.py [--model smollm2-135m] [--clients 32] [--contexts 8] [--seconds 120] [--limit N]

A server of its own is started, and asked over HTTP with streaming. First one client asks every question about every context
once; that is what one client gets, and what the answers should be. Then all clients ask for some minutes, each its next question
when the last is answered. Answers are greedy and in float32, where company may not change a word; in bfloat16 a tie may turn.
The first is the examples' text, the others are made up. Memory is the server's resident one, looked at every second.

Writes results/benchmark-serving.json. With --limit, for a short try, each client asks so many questions at most, and nothing is
written.
"""

import argparse
import http.client
import itertools
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from facts import Document, documents, long_text
from measuring import ROOT, write_page, write_result

RATIO, NEW_TOKENS, ROUNDS = 10, 48, 5
CLOCK = ("Who built the clock?", "What is the brass hand moved by?", "How many steps are there?", "When is the clock wound?")


@dataclass(frozen=True)
class Answer:
    """What came of a question, and when, in seconds. error: what went wrong, or None."""

    text: str
    tokens: int
    first: float
    total: float
    error: str | None = None


class Server:
    """`dodo serve` in a process of its own, as a client sees it."""

    def __init__(self, process: subprocess.Popen[bytes], said: dict[str, Any]) -> None:
        self.process, self.model = process, Path(said["model"]).name
        self._host = urlsplit(said["address"]).netloc

    def add(self, text: str) -> dict[str, Any]:
        """Store a text."""
        with self._asked("/v1/contexts", {"text": text, "ratio": RATIO}) as response:
            made: dict[str, Any] = json.load(response)
        assert response.status == 201, made
        return made

    def ask(self, question: str, context: str | None, *, tokens: int = NEW_TOKENS) -> Answer:
        """Ask, and read the answer as it comes."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "context_ids": [] if context is None else [context],
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun, first, texts, used, done = time.perf_counter(), math.nan, list[str](), 0, False
        try:
            with self._asked("/v1/chat/completions", body) as response:
                if response.status != 200:
                    raise RuntimeError(f"{response.status}: {response.read()[:200]!r}")
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    if not texts:
                        first = time.perf_counter() - begun
                    if done := line == b"data: [DONE]\n":
                        break
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    texts += [choice["delta"].get("content", "") for choice in event["choices"]]
                    used = (event.get("usage") or {}).get("completion_tokens", used)
            error = None if done else "the answer was cut off"
        except (OSError, RuntimeError, http.client.HTTPException) as failure:
            error = repr(failure)
        return Answer("".join(texts), used, first, time.perf_counter() - begun, error)

    @contextmanager
    def _asked(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, timeout=600)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long document")
    parser.add_argument("--limit", type=int, help="questions of each client at most; nothing is written")
    given = parser.parse_args()
    clock = Document((ROOT / "examples" / "harbour-clock.txt").read_text(encoding="utf-8"), CLOCK)
    texts = [clock, *documents(given.contexts - 1)]
    with tempfile.TemporaryDirectory() as folder, serving(given, Path(folder)) as server, Memory(server.process.pid) as memory:
        made = [server.add(text.text) for text in texts]
        asked = [(context["id"], question) for context, text in zip(made, texts, strict=True) for question in text.questions]
        asked = asked[:: max(1, len(asked) // given.limit)] if given.limit else asked
        server.ask(asked[0][1], asked[0][0])  # the first one waits for what is made once
        alone, seconds_alone = alone_one_by_one(server, asked)
        memory.mark("before the load")
        answers, seconds = together(server, asked, clients=given.clients, seconds=given.seconds, limit=given.limit)
        memory.mark("after the load")
        measured = {
            f"{given.clients} clients, {len(made)} contexts": load(asked, alone, seconds_alone, answers, seconds),
            "the server's memory": memory.told(),
            f"first token, about {given.long:,} tokens": first_token(server, given.long),
        }
    if given.limit is not None:
        print(json.dumps(measured, indent=2))
        return
    settings = {
        "model": given.model,
        "dtype": given.dtype,
        "tokens of a context": f"{min(c['n'] for c in made)} to {max(c['n'] for c in made)}",
        "ratio": RATIO,
        "different questions": len(asked),
        "new tokens": f"{NEW_TOKENS} at most",
    }
    path = write_result("benchmark-serving", measured, settings=settings)
    page = write_page()
    print(page.read_text(encoding="utf-8"))
    print(f"written to {path.relative_to(ROOT)} and {page.relative_to(ROOT)}", file=sys.stderr)


@contextmanager
def serving(given: argparse.Namespace, folder: Path) -> Iterator[Server]:
    """A server at a free port, stopped in the end."""
    command = [sys.executable, "-m", "dodo", "serve", "--port", "0", "--json", "--store", str(folder / "store")]
    command += ["--model", given.model, "--dtype", given.dtype, "--max-batch", str(given.clients), "--timeout", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = b"".join(itertools.takewhile(lambda line: line != b"}\n", process.stdout)) + b"}"
            yield Server(process, json.loads(said))
        finally:
            process.send_signal(signal.SIGINT)


def alone_one_by_one(server: Server, asked: Sequence[tuple[str, str]]) -> tuple[dict[tuple[str, str], Answer], float]:
    """What one client gets for each question, and the seconds that all took."""
    begun = time.perf_counter()
    answers = {(context, question): server.ask(question, context) for context, question in asked}
    return answers, time.perf_counter() - begun


def together(
    server: Server, asked: Sequence[tuple[str, str]], *, clients: int, seconds: float, limit: int | None
) -> tuple[list[tuple[tuple[str, str], Answer]], float]:
    """What all clients get, each beginning at another question, and the seconds that it took."""
    begun = time.perf_counter()

    def client(number: int) -> list[tuple[tuple[str, str], Answer]]:
        got = []
        for turn in itertools.count() if limit is None else range(limit):
            if time.perf_counter() - begun > seconds:
                break
            pair = asked[(number * len(asked) // clients + turn) % len(asked)]
            got.append((pair, server.ask(pair[1], pair[0])))
        return got

    with ThreadPoolExecutor(clients) as pool:
        answers = [each for got in pool.map(client, range(clients)) for each in got]
    return answers, time.perf_counter() - begun


def load(
    asked: Sequence[tuple[str, str]],
    alone: dict[tuple[str, str], Answer],
    seconds_alone: float,
    answers: Sequence[tuple[tuple[str, str], Answer]],
    seconds: float,
) -> dict[str, int | float]:
    """The figures of many clients, beside those of one."""
    good = [answer for _, answer in answers if answer.error is None]
    for error in sorted({answer.error for answer in [*alone.values(), *(a for _, a in answers)] if answer.error}):
        print(error, file=sys.stderr)
    one = sum(answer.tokens for answer in alone.values()) / seconds_alone
    many = sum(answer.tokens for answer in good) / seconds
    figures: dict[str, int | float] = {
        "seconds": seconds,
        "answers": len(answers),
        "errors": len(answers) - len(good) + sum(answer.error is not None for answer in alone.values()),
        "answers equal to those of the question asked alone, share": (
            sum(answer.error is None and answer.text == alone[pair].text for pair, answer in answers) / max(1, len(answers))
        ),
        "tokens of an answer, mean": statistics.fmean(answer.tokens for answer in alone.values()),
        "one client: tokens/s": one,
        "all clients: tokens/s": many,
        "all clients / one: tokens/s": many / one,
    }
    for who, got in (("one client", list(alone.values())), ("all clients", good)):
        for what, values in (("first token", [a.first for a in got]), ("whole answer", [a.total for a in got])):
            figures |= {f"{who}: {what}, p{p}, s": percentile(values, p) for p in (50, 95)}
    return figures


def first_token(server: Server, tokens: int) -> dict[str, int | float]:
    """Seconds to the first token of a question about a long text, stored and in the prompt, by turns; medians."""
    sample = server.add(long_text(20))
    text = long_text(round(20 * tokens / sample["n"]))
    context, question = server.add(text), "What did the miller build?"
    stored, prompt = list[float](), list[float]()
    for _ in range(ROUNDS + 1):
        for times, answer in (
            (stored, server.ask(question, context["id"], tokens=1)),
            (prompt, server.ask(f"{text}\n\n{question}", None, tokens=1)),
        ):
            assert answer.error is None, answer.error
            times.append(answer.first)
    one, other = statistics.median(stored[1:]), statistics.median(prompt[1:])
    return {
        "tokens of the text": context["n"],
        "stored context, s": one,
        "text in the prompt, s": other,
        "stored sooner by": other / one,
    }


class Memory:
    """Resident bytes of a process while this is open, every second, as a thread sees them. Marks name moments."""

    def __init__(self, pid: int) -> None:
        self._process, self._seen, self._marks = psutil.Process(pid), list[int](), dict[str, int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def mark(self, name: str) -> None:
        """Remember what is resident now, and which of the seconds this is."""
        self._marks[name] = len(self._seen)
        self._seen.append(self._process.memory_info().rss)

    def told(self) -> dict[str, int | float]:
        """Medians of the first, middle and last tenth between two marks, and how much the last is above the middle."""
        begin, end = self._marks.values()
        seen = self._seen[begin : end + 1]
        size = max(1, len(seen) // 10)
        middle = len(seen) // 2
        parts = {"start": seen[:size], "middle": seen[middle : middle + size], "end": seen[-size:]}
        told: dict[str, int | float] = {f"{name}, bytes": round(statistics.median(part)) for name, part in parts.items()}
        return {**told, "most, bytes": max(seen), "end / middle": told["end, bytes"] / told["middle, bytes"]}

    def _look(self) -> None:
        while not self._over.wait(1):
            self._seen.append(self._process.memory_info().rss)


def percentile(values: Sequence[float], p: int) -> float:
    """The p-th of a hundred; not a number where there are no values."""
    return sorted(values)[min(len(values) - 1, math.ceil(p / 100 * len(values)) - 1)] if values else math.nan


if __name__ == "__main__":
    main()

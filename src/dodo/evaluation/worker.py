"""A process of another Python that is asked in lines of JSON, one answer to a line, in order.

For what can't be imported here because its requirements clash with ours. The script gets requests on its standard input and
answers on its standard output; an answer with `error` in it is raised here.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import weakref
from pathlib import Path
from typing import IO, Any

from dodo.errors import InputError

__all__ = ["Worker"]

_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


class Worker:
    """A script, running. It ends with this object, or with this process.

    Args:
        name: what it is called in errors.
        python: that runs it.
        script: a file; modules beside it are not importable.
    """

    def __init__(self, name: str, python: Path, script: Path) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self._process = subprocess.Popen(
                [python, "-I", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **_ENVIRONMENT},
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for us; it ends when its input does
            )
        except OSError as error:
            self._errors.close()
            raise InputError(f"{name}: {python} does not run: {error.strerror}") from None
        self.close = weakref.finalize(self, _end, self._process, self._errors)
        """Ends the process; more than once does nothing."""

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Send a request, and wait for its answer.

        Raises:
            InputError: the script answered with an error, with something else than JSON, or is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self.close.alive:
            raise InputError(f"{self.name}: its process has been ended")
        try:
            self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise InputError(f"{self.name}: its process ended: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise InputError(f"{self.name}: its process answered {line.strip()[:80]!r}, which is no JSON") from None
        if "error" in answer:
            raise InputError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else f"exit status {code}"


def _end(process: "subprocess.Popen[str]", errors: IO[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already
        process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:  # in the middle of a long computation
        process.kill()
        process.wait()
    process.stdout.close()
    errors.close()

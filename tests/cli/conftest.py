"""One tiny model on disk for all verbs, and a way to call them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dodo.cli import dodo
from tests.cli.tiny import TEXT, save_adapters, save_model

COMMAND = (sys.executable, "-c", "from dodo.cli import main; main()")
"""The command, for a process of its own."""


@dataclass(frozen=True)
class Models:
    """Folders for `--model`."""

    base: str
    other: str
    """Of the same shape, with other weights."""
    wider: str
    """Of another shape."""
    trained: str
    """Adapters of `base`."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    base = save_model(root / "base")
    return Models(
        base=str(base),
        other=str(save_model(root / "other", seed=1)),
        wider=str(save_model(root / "wider", hidden_size=64)),
        trained=str(save_adapters(root / "trained", base=base)),
    )


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "dodo.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def run() -> Callable[..., Result]:
    """Calls a verb: run("info", "--json"). An error that is not of one line fails the test."""

    def call(*arguments: object, stdin: bytes | str | None = None) -> Result:
        result = CliRunner().invoke(dodo, [str(argument) for argument in arguments], input=stdin, prog_name="dodo")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code not in (0, 130):
            assert [line for line in result.stderr.splitlines() if line][-1].startswith("error: ")
        return result

    return call


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that asks for this must find its error before a model is loaded."""
    from dodo.model import Dodo

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Dodo, "from_pretrained", refuse)

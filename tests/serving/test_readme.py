"""The README's section on serving works as written, but for the model and the port."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving.conftest import MODEL, tiny_dodo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def section(listening):
    address, _ = listening(dodo=tiny_dodo(window=8192))
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Serve\n")[2].partition("\n## ")[0]
    return text.replace("http://127.0.0.1:8000", address).replace('"smollm2-135m"', f'"{MODEL}"')


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_what_curl_is_told_works(section):
    commands = [line for block in blocks(section, "sh") for line in block.splitlines() if line.startswith("curl")]
    told = [
        subprocess.run(["bash", "-c", f"{command}"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for command in commands
    ]
    added, listed = [json.loads(answer) for answer in told[:-1]], json.loads(told[-1])
    assert len(added) == 2
    assert listed["data"] == added[::-1]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the client is not closed
def test_the_python_works(section, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (block,) = blocks(section, "python")
    exec(compile(block, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) >= 256

"""What the documents say is true: commands exist, links lead somewhere, named tests exist, Python runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dodo.cli import VERBS, dodo

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_targets_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for verb in re.findall(r"^\s*dodo ([a-z][a-z-]*)", text, flags=re.MULTILINE):
        assert verb in VERBS, verb
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", text, flags=re.MULTILINE):
        assert f"\n{''.join(target)}:" in targets, target
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_options_of_commands_in_blocks_exist() -> None:
    parsed = 0
    for page in [*PAGES, ROOT / "src/dodo/weights/smollm2-135m/README.md"]:
        for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                for command in re.findall(r"(?:^|-m |[|;] *)dodo ([^|;>]+)", line.strip()):
                    verb, *arguments = shlex.split(command, comments=True)
                    known = dodo.get_command(click.Context(dodo), verb)
                    known.make_parser(click.Context(known)).parse_args(arguments)  # NoSuchOption; values are not looked at
                    parsed += 1
    assert parsed > 30


@pytest.mark.parametrize("page", ["paper-map.md", "faults.md"])
def test_tests_that_documents_name_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("**/test_*.py")}
    named = re.findall(r"`(test_\w+)\.(test_\w+)`", text)
    assert len(named) > 10
    for module, test in named:
        assert f"def {test}(" in sources[module], f"{module}.{test}"


@pytest.mark.slow
def test_the_readmes_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    blocks = [block for block in blocks if "http://" not in block]  # tests/serving/test_readme.py has a server for these
    assert blocks
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_a_failing_test_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert False\n", encoding="utf-8")
    (command,) = re.findall(r"^test: .*\n\t(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    command = command.replace("$(BIN)/python", shlex.quote(sys.executable))
    assert subprocess.run(["sh", "-c", f"{command} test_it.py"], cwd=tmp_path, capture_output=True).returncode == 1

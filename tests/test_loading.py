"""Which model, for processes elsewhere."""

from pathlib import Path

import pytest

from dodo.loading import Loading


def test_folders_are_whole_paths_elsewhere_and_known_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "base", "smollm2-135m", "smollm2-135m-autoregressive"):
        (tmp_path / name).mkdir()
    assert Loading("mine", base="base").from_anywhere() == Loading(str(tmp_path / "mine"), base=str(tmp_path / "base"))
    for known in ("smollm2-135m", "smollm2-135m-autoregressive", "someone/on-the-hub"):
        assert Loading(known, base="smollm2-135m").from_anywhere() == Loading(known, base="smollm2-135m")
    assert Loading("./smollm2-135m").from_anywhere().model == str(tmp_path / "smollm2-135m")

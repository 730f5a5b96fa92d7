"""Files that are replaced whole."""

import os
import stat
from pathlib import Path

import pytest

from dodo.files import replacing, write_whole


def test_writers_at_the_same_time_have_a_file_each_and_the_last_to_end_stays(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    with replacing(path) as one:
        one.write_text("one")
        with replacing(path) as two:
            two.write_text("two")
        early = path.open()
    assert early.read() == "two"  # whoever has it open keeps what was there
    early.close()
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    write_whole(path, "before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "some.txt", "lost")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="no ordinary file"):
        write_whole(pipe, "text")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_a_file_is_for_all_to_read_whatever_its_name(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        for name in ("some.txt", "é" * 120):
            write_whole(tmp_path / name, "text")
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644
    finally:
        os.umask(before)

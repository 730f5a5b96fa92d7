"""Laws of what a server is told at its start."""

import pytest

from dodo.errors import InputError
from dodo.loading import Loading
from dodo.serving.settings import Settings, read_keys


@pytest.mark.parametrize(
    ("given", "kept"),
    [("https://Example.org/", "https://example.org"), ("http://localhost:3000", "http://localhost:3000"), ("*", "*")],
)
def test_origins_are_kept_as_browsers_send_them(tmp_path, given, kept):
    assert Settings(tmp_path, cors_origins=(given,)).cors_origins == (kept,)


@pytest.mark.parametrize("wrong", ["example.org", "https://example.org/page", "localhost:3000", "", "https://a@b.org"])
def test_what_is_no_origin_is_refused(tmp_path, wrong):
    with pytest.raises(InputError, match="an origin is like"):
        Settings(tmp_path, cors_origins=(wrong,))


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path):
    path, key = tmp_path / "keys", "0123456789abcdef0123"
    path.write_text(f"# of today\r\n{key}\r\n", encoding="utf-8-sig")
    assert read_keys(path) == (key,)
    path.write_text(f"{key}é", encoding="utf-8")
    with pytest.raises(InputError, match="can't hold"):
        read_keys(path)


def test_a_runs_best_adapters_are_called_by_the_run(tmp_path):
    (tmp_path / "my-run" / "best").mkdir(parents=True)
    assert Settings(tmp_path, loading=Loading(str(tmp_path / "my-run" / "best"))).name == "my-run"
    assert Settings(tmp_path, loading=Loading(str(tmp_path / "my-run"))).name == "my-run"
    assert Settings(tmp_path, loading=Loading("someone/adapters")).name == "someone/adapters"

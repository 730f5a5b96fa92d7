"""Laws of a process that is asked in lines of JSON."""

import sys
from pathlib import Path

import pytest

from dodo.errors import InputError
from dodo.evaluation.worker import Worker

SCRIPT = Path(__file__).parents[1] / "standins" / "peer.py"


@pytest.fixture
def worker():
    worker = Worker("peer", Path(sys.executable), SCRIPT)
    yield worker
    worker.close()


def test_answers_come_in_order_and_as_they_were_sent(worker):
    for sent in ({"number": i, "text": "café\n🙂 \u2028"} for i in range(3)):
        assert worker.ask("echo", **sent) == sent


def test_an_error_in_the_worker_is_one_line_and_it_goes_on(worker):
    with pytest.raises(InputError, match=r"^peer: ValueError: the last line$"):
        worker.ask("fail")
    assert worker.ask("echo", a=1) == {"a": 1}


def test_a_worker_that_dies_leaves_its_last_line(worker):
    for _ in range(2):
        with pytest.raises(InputError, match=r"^peer: its process ended: RuntimeError: out of memory$"):
            worker.ask("die")


def test_what_is_no_json_is_refused(worker):
    with pytest.raises(InputError, match="answered 'not JSON', which is no JSON"):
        worker.ask("babble")


def test_it_ends_with_its_object():
    worker = Worker("peer", Path(sys.executable), SCRIPT)
    process = worker._process
    del worker
    assert process.returncode == 0


def test_nothing_is_asked_after_its_end(worker):
    worker.close()
    with pytest.raises(InputError, match="has been ended"):
        worker.ask("echo")


def test_a_file_that_is_no_python_is_refused():
    with pytest.raises(InputError, match=r"peer: .*peer\.py does not run: Permission denied"):
        Worker("peer", SCRIPT, SCRIPT)

"""Laws of two servers that share a store, each in a process of its own. Slow."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.cli.test_serve import serving
from tests.cli.tiny import TEXT

pytestmark = pytest.mark.slow


def call(address, method, path, body=None):
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
    connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    told = json.load(response)
    connection.close()
    return response.status, told


def answer(address, context):
    body = {"model": "base", "messages": [{"role": "user", "content": "Where?"}], "max_tokens": 5, "context_ids": [context]}
    status, told = call(address, "POST", "/v1/chat/completions", body)
    return status, told["choices"][0]["message"]["content"] if status == 200 else None


def test_both_add_ask_and_delete_and_what_one_acknowledged_the_other_has_when_it_is_killed(models, tmp_path):
    flags = ("--model", models.base, "--store", tmp_path / "store")
    with serving(*flags) as first:
        with serving(*flags) as second:

            def work(number):
                own, other = (first, second) if number % 2 else (second, first)
                kept, gone = [], []
                for turn in range(6):
                    status, made = call(own, "POST", "/v1/contexts", {"text": f"{number} {turn} {TEXT}", "ratio": 3})
                    assert status == 201, made
                    here, there = answer(own, made["id"]), answer(other, made["id"])
                    assert here == there and here[0] == 200
                    if turn % 3 == 0:
                        assert call(other, "DELETE", f"/v1/contexts/{made['id']}")[0] == 200
                        assert answer(own, made["id"])[0] == answer(other, made["id"])[0] == 404
                        gone.append(made["id"])
                    else:
                        kept.append((made["id"], here))
                return kept, gone

            with ThreadPoolExecutor(4) as pool:
                done = list(pool.map(work, range(4)))
        kept, gone = ([each for part in parts for each in part] for parts in zip(*done, strict=True))
        status, told = call(first, "GET", "/v1/contexts?limit=100")  # the second was killed
        assert status == 200 and {context["id"] for context in told["data"]} == {context for context, _ in kept}
        assert all(answer(first, context) == before for context, before in kept)
        assert all(answer(first, context)[0] == 404 for context in gone)

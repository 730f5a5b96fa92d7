"""Whatever is asked, the server does not fall over: requests made up by schemathesis from the API's own document."""

import hypothesis
import pytest

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis")


def test_no_request_makes_the_server_fail(listening):
    address, _ = listening(max_new_tokens=4, max_document=400, max_choices=4, max_body=100_000)
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
        def ask(case):
            response = case.call()
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        ask()

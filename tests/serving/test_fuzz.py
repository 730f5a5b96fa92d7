"""Whatever is asked, the server does not fall over: requests made up by schemathesis from the API's own document."""

from collections import Counter

import hypothesis
import schemathesis

from tests.serving.conftest import MODEL


def test_no_request_makes_the_server_fail(listening):
    address, _ = listening(max_new_tokens=4, max_document=400, max_choices=4, max_body=100_000)
    operations = [found.ok() for found in schemathesis.openapi.from_url(f"{address}/openapi.json").get_all_operations()]
    assert len(operations) >= 10
    statuses: Counter[int] = Counter()
    for operation in operations:

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
        def ask(case):
            if isinstance(case.body, dict) and "model" in case.body:  # names and lengths made up would be refused each time
                case.body |= {"model": MODEL, "context_ids": [], "max_tokens": 3, "max_completion_tokens": 3}
                if "prompt" in case.body:
                    del case.body["max_completion_tokens"]
            response = case.call()
            statuses[response.status_code] += 1
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        ask()
    assert min(statuses[status] for status in (200, 201, 400, 404, 422)) > 0, statuses

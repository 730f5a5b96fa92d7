"""Whatever is asked, the server does not fall over: requests made up by schemathesis from the API's own document."""

import hypothesis
import pytest

pytestmark = pytest.mark.slow

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture
def api(listening):
    address, _ = listening(max_new_tokens=4, max_document=400, max_choices=4, max_body=100_000)
    return schemathesis.openapi.from_url(f"{address}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@hypothesis.settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_request_makes_the_server_fail(case):
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and case.method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}

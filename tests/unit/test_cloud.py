"""What is asked of AWS beside what its stand-in knows."""

import json

import pytest

from paceline.errors import UserError
from paceline.launch.ec2_client import Cloud

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'paceline[dev]'")


@pytest.fixture
def cloud(monkeypatch) -> Cloud:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    return Cloud("eu-west-1")


@pytest.mark.parametrize("job", ["", "*", "a?", "a b"])
def test_what_is_no_name_of_a_job_gives_nothing_back(cloud: Cloud, job: str) -> None:
    """An unset variable of a shell, or what AWS takes for a pattern."""
    with pytest.raises(UserError, match="is no job"):
        cloud.release(job)


def test_the_price_on_demand_is_found_or_unknown(cloud: Cloud, monkeypatch) -> None:
    from botocore.stub import ANY, Stubber

    client = boto3.client("pricing", region_name="us-east-1")
    monkeypatch.setattr(cloud._session, "client", lambda *_, **__: client)
    term = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "0.7520000000"}}}}}}}
    with Stubber(client) as stub:
        asked = {"ServiceCode": "AmazonEC2", "Filters": ANY, "MaxResults": 10}
        stub.add_response("get_products", {"PriceList": [json.dumps(term)]}, asked)
        stub.add_response("get_products", {"PriceList": []}, asked)
        stub.add_client_error("get_products", "AccessDeniedException")
        assert cloud.price("g4dn.2xlarge") == 0.752
        assert cloud.price("g4dn.3xlarge") is None
        assert cloud.price("g4dn.2xlarge") is None  # without the right to ask

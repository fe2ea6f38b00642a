"""Requests to AWS that moto does not cover."""

import json

import pytest
from conftest import raises

from paceline.launch.ec2_client import Ec2Client

boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'paceline[dev]'")


@pytest.fixture
def client(monkeypatch) -> Ec2Client:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    return Ec2Client("eu-west-1")


@pytest.mark.parametrize("job", ["", "*", "a?", "a b"])
def test_nothing_is_released_without_a_job_id(client: Ec2Client, job: str) -> None:
    """An unset shell variable, or a pattern of AWS."""
    with raises("unknown-job"):
        client.release(job)


def test_on_demand_price_is_known_or_none(client: Ec2Client, monkeypatch) -> None:
    from botocore.stub import ANY, Stubber

    pricing = boto3.client("pricing", region_name="us-east-1")
    monkeypatch.setattr(client._session, "client", lambda *_, **__: pricing)
    term = {"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "0.7520000000"}}}}}}}
    with Stubber(pricing) as stub:
        request = {"ServiceCode": "AmazonEC2", "Filters": ANY, "MaxResults": 10}
        stub.add_response("get_products", {"PriceList": [json.dumps(term)]}, request)
        stub.add_response("get_products", {"PriceList": []}, request)
        stub.add_client_error("get_products", "AccessDeniedException")
        assert client.on_demand_price("g4dn.2xlarge") == 0.752
        assert client.on_demand_price("g4dn.3xlarge") is None
        assert client.on_demand_price("g4dn.2xlarge") is None  # without permission

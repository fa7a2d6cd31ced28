"""Files behind the protocols of object stores: S3, and the hub's."""

import json
import logging
import pickle
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from heron.base.errors import ShardError
from heron.shards.remote import Missing
from tests.shards.servers import Fault, web
from tests.shards.test_remote import DATA, SIZE, SUM, left, store


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server that speaks S3, and has DATA as s3://shards/set/a.tar."""
    server = pytest.importorskip("moto.server", reason="needs moto")
    pytest.importorskip("s3fs", reason="needs s3fs")
    boto3 = pytest.importorskip("boto3")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "maker",
            "AWS_SECRET_ACCESS_KEY": "maker",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "NO_PROXY": "127.0.0.1",
        }.items():
            patch.setenv(name, value)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        running.start()
        url = "http://{}:{}".format(*running.get_host_and_port())
        patch.setenv("AWS_ENDPOINT_URL", url)
        client = boto3.client("s3")
        client.create_bucket(Bucket="shards")
        client.put_object(Bucket="shards", Key="set/a.tar", Body=DATA)
        yield url
        running.stop()


def test_s3(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heron.shards.remote.BLOCK", 100_000)  # three requests
    remote = store("s3://shards/set", tmp_path)
    with pickle.loads(pickle.dumps(remote)).local("a.tar", SIZE, SUM) as held:
        assert held.path.read_bytes() == DATA
    assert remote.read_bytes("a.tar") == DATA and remote.names() == {"a.tar"}
    with pytest.raises(
        Missing, match=r"^s3://shards/set/manifest.json: no such file, but the manifest lists it; "
    ):
        remote.read_bytes("manifest.json")
    for url, name, message in [
        ("s3://shards/set", "b.tar", "no such file \\(The specified key does not exist\\.\\)"),
        ("s3://nowhere/set", "a.tar", "no such file \\(The specified bucket does not exist\\)"),
        ("s3://B_!/set", "a.tar", 'ParamValidationError: .* Invalid bucket name "B_!"'),
    ]:
        with pytest.raises(ShardError, match=f"{url}/{name}: {message}"):
            store(url, tmp_path).local(name, SIZE, "0" * 64)
    size, other = SIZE + 1, "0" * 64
    with pytest.raises(ShardError, match=f"256,000 bytes with sha256 {SUM} instead of 256,001"):
        remote.local("a.tar", size, other)
    assert left(tmp_path) == [SUM]


def test_s3_that_fails(s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with web({"shards/set/a.tar": DATA}) as site:
        remote = store("s3://shards/set", tmp_path, endpoint_url=site.url)
        for fault in (Fault("status"), Fault("close", 1000), Fault("stall", 1000)):
            site.requests.clear()
            site.faults["shards/set/a.tar"] = [fault] * 30
            with pytest.raises(ShardError, match="^s3://shards/set/a.tar: failed 3 times, the l"):
                remote.local("a.tar", SIZE, SUM)
            assert len(site.requests) == 3  # attempts of ours, with none of the library's between
        assert "attempt 3 of 3 follows" in caplog.text and left(tmp_path) == []
        site.faults["shards/set/a.tar"] = [fault]
        with remote.local("a.tar", SIZE, SUM) as held:
            assert held.path.read_bytes() == DATA


def test_s3_credentials(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3")
    iam, policy = boto3.client("iam"), {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    document = json.dumps({"Version": "2012-10-17", "Statement": [policy]})
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=document)

    def checked(after: str) -> None:  # how many calls are allowed without a look at the key
        body, plain = after.encode(), {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(f"{s3}/moto-api/reset-auth", body, plain))

    right = {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}
    checked("0")
    try:
        store("s3://shards/set", tmp_path, **right).local("a.tar", SIZE, SUM).close()
        wrong = {"key": "nobody", "secret": "none-at-all"}
        for options in (right | {"secret": "wrong-secret"}, wrong):
            refused = store("s3://shards/set", tmp_path / "other", **options)
            with pytest.raises(ShardError, match=r"a.tar: not allowed \(PermissionError") as error:
                refused.local("a.tar", SIZE, SUM)
            assert options["secret"] not in str(error.value)
    finally:
        checked("inf")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ShardError, match=r"not allowed \(NoCredentialsError: Unable to locate"):
        store("s3://shards/set", tmp_path / "other").local("a.tar", SIZE, SUM)


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its protocol as far as a file needs it, on loopback: the hub itself is not asked."""
    # Another test may have imported the library while it was to ask nobody.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    listing = [{"type": "file", "path": "x/a.tar", "size": SIZE, "oid": "0" * 40}]
    with web(
        {
            "api/datasets/user/name": json.dumps({"id": "user/name"}).encode(),
            "api/datasets/user/name/tree/main/x": json.dumps(listing).encode(),
            "datasets/user/name/resolve/main/x/a.tar": DATA,
        }
    ) as site:
        remote = store("hf://datasets/user/name/x", tmp_path, endpoint=site.url, token=False)
        with remote.local("a.tar", SIZE, SUM) as held:
            assert held.path.read_bytes() == DATA
        assert remote.names() == {"a.tar"}
        with pytest.raises(Missing, match="^hf://datasets/user/name/x/b.tar: no such file"):
            remote.local("b.tar", SIZE, "0" * 64)
    assert left(tmp_path) == [SUM]

"""The policies for the bucket: they have each right that the client needs, and no other.

MinIO enforces them here. It evaluates the same documents as AWS, but gives them to users by an interface of its own; so
the requests lose their signature on the way, and the policy stands in the bucket's, for everybody.
"""

from __future__ import annotations

import ast
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import boto3
import pytest

from tests.support.s3_servers import ROOT, S3Server
from tidelog.chaos.faulty_s3 import Fault, FaultyS3
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError
from tidelog.storage.bucket.common import StoreAccessDenied
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.store import ObjectNotFound, UnfinishedUpload

MIB = 1 << 20
FOLDER = ROOT / "deploy" / "aws"
EXAMPLE = "my-tidelog"
POLICY = json.loads((FOLDER / "iam-policy.json").read_text(encoding="utf-8"))
RIGHTS = sorted(action for statement in POLICY["Statement"] for action in statement["Action"])
UNSIGNED = Fault(drop_headers=("Authorization", "X-Amz-Content-Sha256", "X-Amz-Date"))
ACTIONS = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "create_bucket": "s3:CreateBucket",
    "create_multipart_upload": "s3:PutObject",
    "delete_objects": "s3:DeleteObject",
    "get_async": "s3:GetObject",
    "get_object": "s3:GetObject",
    "get_range_async": "s3:GetObject",
    "head_bucket": "s3:ListBucket",
    "head_object": "s3:GetObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_objects_v2": "s3:ListBucket",
    "put_async": "s3:PutObject",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
}
"""The right that S3 asks for, by the method of a client."""


def test_the_policy_has_the_rights_for_what_the_client_does_and_no_other() -> None:
    called = set()
    for path in (ROOT / "storage" / "bucket").glob("*.py"):
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                on = each.func.value
                name = on.id if isinstance(on, ast.Name) else on.attr if isinstance(on, ast.Attribute) else ""
                if name in ("client", "_client", "obstore"):
                    called.add(each.func.attr)
    assert called == set(ACTIONS), "which right does this need? The policy and this table must have it"
    assert {*ACTIONS.values()} - {"s3:CreateBucket"} == set(RIGHTS)


def test_readers_may_read_records_and_nothing_else() -> None:
    policy = json.loads((FOLDER / "iam-policy-reader.json").read_text(encoding="utf-8"))
    assert [(each["Action"], each["Resource"]) for each in policy["Statement"]] == [
        (["s3:GetObject"], f"arn:aws:s3:::{EXAMPLE}/*/objects/*")
    ]


def for_everybody(bucket: str, rights: Iterable[str]) -> str:
    """The policy with these of its rights, as a bucket's."""
    text = json.dumps(POLICY).replace(EXAMPLE, bucket)
    document = json.loads(text)
    for statement in document["Statement"]:
        statement["Principal"] = {"AWS": ["*"]}
        statement["Action"] = [action for action in statement["Action"] if action in rights]
    document["Statement"] = [statement for statement in document["Statement"] if statement["Action"]]
    return json.dumps(document)


@contextlib.asynccontextmanager
async def unsigned(server: S3Server) -> AsyncIterator[tuple[S3ObjectStore, Any, str]]:
    """A store whose requests have the rights of the bucket's policy alone, a client with all rights, and the bucket."""
    async with FaultyS3(server) as proxy:
        settings = proxy.server.settings(multipart_bytes=5 * MIB, create_bucket=False)
        owner = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=server.access_key_id,
            aws_secret_access_key=server.secret_access_key,
        )
        owner.create_bucket(Bucket=settings.bucket)
        proxy.fault = lambda seen: UNSIGNED
        store = S3ObjectStore(settings, SystemClock(), random.Random(5))
        try:
            yield store, owner, settings.bucket
        finally:
            await store.close()
            owner.close()


async def do_everything(store: S3ObjectStore, upload_id: str) -> None:
    """Each request that brokers, controllers and tools make."""
    await store.start()
    await store.probe()
    await store.put("c/one", [b"one"])
    await store.put("c/new", [b"two"], if_absent=True)
    await store.put("c/large", [bytes(6 * MIB)])
    assert await store.get("c/one") == b"one"
    assert [bytes(each) for each in await store.get_ranges("c/large", [(0, 2), (5, 6)])] == [bytes(2), bytes(1)]
    assert (await store.head("c/large")).size == 6 * MIB
    with pytest.raises(ObjectNotFound):
        await store.head("c/none")
    assert {info.key async for info in store.list("c/")} == {"c/one", "c/new", "c/large"}
    await store.unfinished("c/")
    await store.abort(UnfinishedUpload("c/begun", upload_id, 0))
    await store.delete(["c/one", "c/new", "c/large"])


async def begin_upload(owner: Any, bucket: str) -> str:
    return str(owner.create_multipart_upload(Bucket=bucket, Key="c/begun")["UploadId"])


@pytest.mark.servers("minio")
async def test_with_the_policy_everything_works(minio_server: S3Server) -> None:
    async with unsigned(minio_server) as (store, owner, bucket):
        with pytest.raises((StoreAccessDenied, ConfigError)):
            await store.start()
        owner.put_bucket_policy(Bucket=bucket, Policy=for_everybody(bucket, RIGHTS))
        await do_everything(store, await begin_upload(owner, bucket))


@pytest.mark.servers("minio")
@pytest.mark.parametrize("right", RIGHTS)
async def test_without_one_of_its_rights_something_is_denied(minio_server: S3Server, right: str) -> None:
    async with unsigned(minio_server) as (store, owner, bucket):
        others = [each for each in RIGHTS if each != right]
        owner.put_bucket_policy(Bucket=bucket, Policy=for_everybody(bucket, others))
        with pytest.raises((StoreAccessDenied, ConfigError)):
            await do_everything(store, await begin_upload(owner, bucket))

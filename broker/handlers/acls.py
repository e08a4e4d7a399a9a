"""ACLs and client quotas, which Tidelog does not have yet.

Without an authorizer Kafka answers ACL requests with SECURITY_DISABLED, and so does this. There are no quotas, so
describing them finds none; AlterClientQuotas is not served, and clients say so by themselves.
"""

from __future__ import annotations

from typing import Any

from broker.handlers.admin_errors import SECURITY_DISABLED
from broker.services import ApiHandler, RequestContext
from broker.wire import schema

MESSAGE = "no authorizer is configured on this broker"


async def describe_acls(context: RequestContext, request: Any) -> Any:
    """DescribeAcls v1–3."""
    s = schema.response(context.api_key, context.api_version)
    return s.make(
        "DescribeAclsResponse", throttle_time=0, error_code=SECURITY_DISABLED, error_message=MESSAGE, resources=[]
    )


async def create_acls(context: RequestContext, request: Any) -> Any:
    """CreateAcls v1–3: one refusal for each ACL."""
    s = schema.response(context.api_key, context.api_version)
    refused = s.make("AclCreationResult", error_code=SECURITY_DISABLED, error_message=MESSAGE)
    return s.make("CreateAclsResponse", throttle_time=0, results=[refused for _ in request.creations])


async def delete_acls(context: RequestContext, request: Any) -> Any:
    """DeleteAcls v1–3: one refusal for each filter."""
    s = schema.response(context.api_key, context.api_version)
    refused = s.make("DeleteAclsFilterResult", error_code=SECURITY_DISABLED, error_message=MESSAGE, matching_acls=[])
    return s.make("DeleteAclsResponse", throttle_time=0, filter_results=[refused for _ in request.filters])


async def describe_client_quotas(context: RequestContext, request: Any) -> Any:
    """DescribeClientQuotas v0–1: none."""
    s = schema.response(context.api_key, context.api_version)
    return s.make("DescribeClientQuotasResponse", throttle_time=0, error_code=0, error_message=None, entries=[])


APIS = [
    ApiHandler(29, 1, 3, describe_acls),
    ApiHandler(30, 1, 3, create_acls),
    ApiHandler(31, 1, 3, delete_acls),
    ApiHandler(48, 0, 1, describe_client_quotas),
]

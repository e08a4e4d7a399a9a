"""ACLs and client quotas, which Tidelog does not support yet.

Without an authorizer Kafka answers ACL requests with SECURITY_DISABLED, and so does this broker. There are no quotas,
so
describing them returns none; AlterClientQuotas is not served, and clients report that themselves.
"""

from __future__ import annotations

from tidelog.broker.kafka.handlers.admin_errors import SECURITY_DISABLED
from tidelog.broker.kafka.services import RequestContext, serve
from tidelog.broker.kafka.wire.messages.cluster import (
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsFilterResult,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

MESSAGE = "no authorizer is configured on this broker"


async def describe_acls(context: RequestContext, request: DescribeAclsRequest) -> DescribeAclsResponse:
    """DescribeAcls v1–3."""
    return DescribeAclsResponse(error_code=SECURITY_DISABLED, error_message=MESSAGE)


async def create_acls(context: RequestContext, request: CreateAclsRequest) -> CreateAclsResponse:
    """CreateAcls v1–3: one error per ACL."""
    refused = AclCreationResult(error_code=SECURITY_DISABLED, error_message=MESSAGE)
    return CreateAclsResponse(results=[refused for _ in request.creations])


async def delete_acls(context: RequestContext, request: DeleteAclsRequest) -> DeleteAclsResponse:
    """DeleteAcls v1–3: one error per filter."""
    refused = DeleteAclsFilterResult(error_code=SECURITY_DISABLED, error_message=MESSAGE)
    return DeleteAclsResponse(filter_results=[refused for _ in request.filters])


async def describe_client_quotas(
    context: RequestContext, request: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    """DescribeClientQuotas v0–1: no entries."""
    return DescribeClientQuotasResponse(error_code=0, error_message=None)


APIS = [
    serve(DescribeAclsRequest, 1, 3, describe_acls),
    serve(CreateAclsRequest, 1, 3, create_acls),
    serve(DeleteAclsRequest, 1, 3, delete_acls),
    serve(DescribeClientQuotasRequest, 0, 1, describe_client_quotas),
]

"""All findings about everything that was gathered, in their order.

Entry: `judge`.
"""

from __future__ import annotations

from tidelog.doctor.facts import Facts, NodeView
from tidelog.doctor.findings import DoctorFinding, found, in_order
from tidelog.doctor.rules_bucket import judge_rights
from tidelog.doctor.rules_cluster import judge_cluster
from tidelog.doctor.rules_config import judge_config, judge_errors
from tidelog.doctor.rules_node import judge_node, judge_tracing


def judge(facts: Facts) -> list[DoctorFinding]:
    """Return every finding, the gravest first."""
    findings = judge_errors(facts.errors, facts.config_file or "configuration")
    for node in facts.nodes:
        findings += _of_node(node, facts.now_ms)
    if facts.cluster is not None:
        findings += judge_cluster(facts.cluster, facts.nodes)
    return in_order(findings)


def _of_node(node: NodeView, now_ms: int) -> list[DoctorFinding]:
    config, findings = node.config, []
    if config is not None:
        machine = node.told.machine if node.told is not None else None
        memory_bytes = machine.usable_memory_bytes if machine is not None else 0
        findings += judge_config(node.where, config, node.sources, memory_bytes)
    findings += judge_node(node, now_ms)
    if node.bucket_error:
        findings.append(found("bucket.settings", node.where, node.bucket_error, cure=node.bucket_hint))
    findings += judge_tracing(node)
    if node.report is not None and node.report.rights is not None:
        in_bucket = config is not None and config.wal.kind == "s3"
        may_create = not node.is_running and config is not None and config.s3.create_bucket
        findings += judge_rights(node.where, node.report.rights, wal_in_bucket=in_bucket, may_create=may_create)
    return findings

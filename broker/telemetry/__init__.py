"""What a broker measures: metrics for Prometheus, requests to the bucket, the load that rides in heartbeats.

Invariants: counting on the request path costs a few additions; the number of series is bounded.

May import: `tidelog.controller.model`, `tidelog.storage.bucket`, `tidelog.runtime`.
Entry: `tidelog.broker.telemetry.metrics.Metrics`; `tidelog.broker.telemetry.registry.PartRegistry`, through which the
parts of a broker tell of themselves. Every name is in docs/metrics.md.
"""

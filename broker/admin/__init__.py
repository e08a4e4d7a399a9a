"""The admin HTTP server, one module for each group of routes: health, metrics, status, and operators' requests.

Invariants: a route that discards data reports which, and requires it to be named in the request; connections and
request sizes are bounded (rule 12).

May import: `tidelog.broker.groups`, `objects`, `partitions`, `telemetry`, `settings`.
Entry: `tidelog.broker.admin.http.AdminHttp`.
"""

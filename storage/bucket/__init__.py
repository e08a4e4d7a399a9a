"""Object stores: one protocol, several backends, and the decorator that schedules and counts requests.

`store` has the protocol `ObjectStore`; `local`, `memory` and `s3` are its backends. `guarded` decorates a backend. It
uses `gate` (bounds requests in flight and serves urgent ones first), `purpose` and `accounts` (the reason for a
request, and the topics whose data it carries) and `health` (when the bucket last answered). `stats` has the counters.

Invariants: a create is conditional where fencing depends on it, and the probe refuses a server that only claims to
support that; transient errors are retried with back-off and jitter inside a budget (rule 11); the number of requests
in flight is bounded (rule 12).

May import: `tidelog.storage.settings`, `tidelog.runtime`. Entry: `tidelog.storage.bucket.open.open_store`.
Private: the `s3_*` modules and `obstore` (only `s3` uses them), `directories` (only `local` does).
"""

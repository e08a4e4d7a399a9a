"""Uploads from the log cache to the bucket: scheduling and execution.

Invariants: only confirmed data is uploaded (rule 2); objects are committed in the order of the WAL, each at the
committed end of its streams (rules 3 and 5).

May import: `tidelog.storage.cache`, `tidelog.storage.objects`, `tidelog.storage.bucket`, the protocols of
`tidelog.storage`, `tidelog.runtime`. Entry: `tidelog.storage.uploads.uploader.Uploader`; the decisions, without I/O,
are in `plan` (what is uploaded when) and `pipeline` (uploads in progress).
"""

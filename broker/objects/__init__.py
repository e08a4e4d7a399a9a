"""Objects of the bucket from a broker's view: reports, and the compactor's view of the metadata.

Invariants: a report is of one version of the metadata, and changes nothing.

May import: `tidelog.controller` and below. Entry: `tidelog.broker.objects.report`,
`tidelog.broker.objects.compaction_view.ImageView`.
"""

"""Cold reads: reads from the bucket, by block, through a cache with read-ahead.

Invariants: no unchecked byte is returned (rule 10); bytes in flight from the bucket are bounded (rule 12); cold reads
have a budget of their own and do not slow producers.

May import: `tidelog.storage.objects`, `tidelog.storage.bucket`, the protocols of `tidelog.storage`, `tidelog.runtime`.
Entry: `tidelog.storage.reads.reader.BlockReader`. Private: `fetcher`, `read_ahead`, `cache`, `budget`, `turns`.
"""

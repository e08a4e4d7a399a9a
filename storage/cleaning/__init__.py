"""Deletion of objects in the bucket that no metadata names any more.

Invariants: an object is deleted only after the metadata that replaces it is committed, and never while a reader can
hold metadata that names it (rule 6).

May import: `tidelog.storage.objects`, `tidelog.storage.bucket`, `tidelog.storage.settings`, `tidelog.runtime`.
Entry: `tidelog.storage.cleaning.orphan_cleaner.OrphanCleaner`, `tidelog.storage.cleaning.deleter`.
"""

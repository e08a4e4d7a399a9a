"""Objects in the bucket: their format, their keys, and how they are built, read and described.

Invariants: every block, index and footer has a CRC32C that is checked when it is read (rule 10); a reader refuses a
version that it does not know; the key of an object follows from cluster id and object id alone.

May import: `tidelog.storage.bucket`, `tidelog.batch`, the protocols of `tidelog.storage`, `tidelog.runtime`.
Entry: `tidelog.storage.objects.writer.build_object`, `tidelog.storage.objects.reader.load_index`; the bytes are in
docs/formats/objects.md.
"""

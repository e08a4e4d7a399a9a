"""A topic as an Iceberg table, exactly once: `tidelog spark table` and `tidelog spark table-compact`.

    job, compaction                    what a run does, on the driver
    upserts, columns                   the last record of each key; columns that records wish for
    tables, store                      the catalog, and commits that happen once; the store of a table's files
    tasks                              what executors do
    attempts, writer, scan             files of a run; rows to files, and files to rows
    rows, reads                        records to rows; tasks that read records
    state, schemas, ddl, values, shapes  plain data: offsets, columns, types, values

Docs: docs/spark.md, docs/design/0022-tables.md. Entry: `pyspark_tidelog.jobs.table.job`, `.compaction`.
"""

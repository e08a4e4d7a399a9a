"""Jobs over whole topics that Spark carries out: `tidelog spark JOB`, or from a program with a session of its own.

    from pyspark_tidelog.jobs import audit
    result = audit.run(spark, audit.AuditOptions(ClusterAccess("127.0.0.1:9092")))

A job is a module with three dataclasses (options, plan, result; the last two are plain data) and two functions:

    plan(options)         what would be done: ranges, bytes, tasks, target. Needs no Spark and changes nothing
    run(spark, options)   does it

Invariants: a job may be killed at any moment and run again; its module says what the second run does. A job prints
nothing but its progress, and that only on a terminal.

May import: the rest of `pyspark_tidelog`. Not `tidelog.cli`, which shows the results.

Entry: `pyspark_tidelog.jobs.frame` for what the jobs share; a module for each job. Docs: docs/spark.md.
"""

"""Runs a recipe of docs/spark.md with a session (`spark_child`)."""

from __future__ import annotations

import contextlib
import io

from pyspark.sql import SparkSession


def run(spark: SparkSession, text: str) -> str:
    """Run a program that expects `spark`; return what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(text, "docs/spark.md", "exec"), {"spark": spark, "__name__": "recipe"})
    return said.getvalue()

"""Tidelog for Spark: the data source `tidelog` (docs/spark.md).

Spark finds it by itself, because the package's name begins with `pyspark_` and it has a `DefaultSource`. An application
on a Spark before that, or one that prefers to be explicit, registers it: `spark.dataSource.register(TidelogSource)`.
"""

from pyspark_tidelog.source import TidelogSource

DefaultSource = TidelogSource

__all__ = ["DefaultSource", "TidelogSource"]

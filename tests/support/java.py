"""The Java programs of `tests/clients/java`, compiled by the JDK's javac with the jars that a fixture provides."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support.external import Program, finished
from tests.support.s3_servers import Missing

SOURCES = Path(__file__).parents[1] / "clients" / "java"


def java_runtime_path() -> str:
    """The path of the Java runtime. Raises `Missing`."""
    found = shutil.which("java")
    if found is None:
        raise Missing("no `java` on PATH: Spark needs a Java runtime")
    return found


class Java:
    """The JDK; what it compiles is in `classes`."""

    def __init__(self, classes: Path) -> None:
        found = [shutil.which(name) for name in ("java", "javac")]
        if None in found:
            raise Missing("java: no `java` and `javac` on PATH: the programs of tests/clients/java need a JDK")
        self._java, self._javac = map(str, found)
        self._classes = classes

    def program(self, name: str, jars: Path, *options: str) -> Program:
        """Compile one of the sources; `options` are the Java machine's."""
        source = str(SOURCES / f"{name}.java")
        finished([self._javac, "-Xlint:all", "-Werror", "-d", str(self._classes), "-cp", f"{jars}/*", source])
        return self.main(name, jars, *options)

    def main(self, name: str, jars: Path, *options: str) -> Program:
        """A main class of the jars, with options of the Java machine."""
        paths = f"{self._classes}:{jars}/*"
        return Program([self._java, "-Xmx256m", "-XX:TieredStopAtLevel=1", *options, "-cp", paths, name])

"""Spark's DDL for columns, as an Iceberg schema: `id long not null, tags array<string>, at timestamp`. No I/O.

Entry: `parse_ddl`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestampType,
    TimestamptzType,
)

from tidelog.runtime.errors import ConfigError

_TOKEN = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|(\w+)|([<>(),:]))")
_PLAIN: dict[str, IcebergType] = {
    "boolean": BooleanType(),
    "byte": IntegerType(),
    "tinyint": IntegerType(),
    "short": IntegerType(),
    "smallint": IntegerType(),
    "int": IntegerType(),
    "integer": IntegerType(),
    "long": LongType(),
    "bigint": LongType(),
    "float": FloatType(),
    "real": FloatType(),
    "double": DoubleType(),
    "string": StringType(),
    "binary": BinaryType(),
    "date": DateType(),
    "timestamp": TimestamptzType(),
    "timestamp_ltz": TimestamptzType(),
    "timestamp_ntz": TimestampType(),
}


def parse_ddl(text: str, source: str) -> list[NestedField]:
    """Return the columns. Raises `ConfigError`, which names `source` and the place of what is wrong."""
    parser = _Parser(text, source)
    fields = list(parser.fields("", ""))
    parser.end()
    return fields


class _Parser:
    """A recursive descent over tokens: (text, is a name in backticks, position)."""

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        self._ids = itertools.count(1)
        self._tokens: list[tuple[str, bool, int]] = []
        self._at = 0
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None:
                raise ConfigError(f"{source}: {text[place:].strip()[:20]!r} is not understood at character {place}")
            quoted, string, word, sign = match.groups()
            value = quoted[1:-1].replace("``", "`") if quoted else string or word or sign
            self._tokens.append((value, quoted is not None, match.start(match.lastindex or 0)))
            place = match.end()

    def _peek(self) -> str:
        """Return the next token, if it is a word or a sign, in lower case."""
        if self._at >= len(self._tokens):
            return ""
        text, is_quoted, _ = self._tokens[self._at]
        return "" if is_quoted else text.lower()

    def _take(self, wanted: str) -> str:
        if self._at >= len(self._tokens):
            raise ConfigError(
                f"{self._source}: {wanted} is expected at the end", hint="for example: id long, name string"
            )
        text, _, _ = self._tokens[self._at]
        self._at += 1
        return text

    def _expect(self, *signs: str) -> str:
        found = self._take(" or ".join(signs))
        if found.lower() not in signs:
            raise self._problem(found, " or ".join(signs))
        return found.lower()

    def _problem(self, found: str, wanted: str) -> ConfigError:
        place = self._tokens[self._at - 1][2]
        return ConfigError(
            f"{self._source}: {found!r} at character {place}, where {wanted} is expected",
            hint="Spark's DDL: id long, name string, tags array<string>",
        )

    def end(self) -> None:
        """Refuse what is left."""
        if self._at < len(self._tokens):
            found = self._take("the end")
            raise self._problem(found, "a comma or the end")

    def fields(self, separator: str, last: str) -> Iterator[NestedField]:
        """Return columns, or fields of a struct up to `last`."""
        while True:
            name = self._take("a name")
            if not name[0].isalnum() and name[0] != "_" and not self._tokens[self._at - 1][1]:
                raise self._problem(name, "a name")
            if self._peek() == ":":
                self._expect(":")
            kind = self._type()
            is_required = self._peek() == "not"
            if is_required:
                self._expect("not")
                self._expect("null")
            doc = None
            if self._peek() == "comment":
                self._expect("comment")
                doc = self._take("a text")[1:-1]
            yield NestedField(next(self._ids), name, kind, required=is_required, doc=doc)
            if self._peek() != ",":
                break
            self._expect(",")
        if last:
            self._expect(last)

    def _type(self) -> IcebergType:
        word = self._take("a type").lower()
        if word in _PLAIN:
            return _PLAIN[word]
        if word in ("decimal", "dec", "numeric"):
            return self._decimal()
        if word == "array":
            self._expect("<")
            element = self._type()
            self._expect(">")
            return ListType(next(self._ids), element, element_required=False)
        if word == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return MapType(next(self._ids), key, next(self._ids), value, value_required=False)
        if word == "struct":
            self._expect("<")
            return StructType(*self.fields(":", ">"))
        raise self._problem(word, "a type")

    def _decimal(self) -> DecimalType:
        precision, scale = "10", "0"
        if self._peek() == "(":
            self._expect("(")
            precision = self._take("a number")
            if self._peek() == ",":
                self._expect(",")
                scale = self._take("a number")
            self._expect(")")
        if not precision.isdecimal() or not scale.isdecimal() or not int(scale) <= int(precision) <= 38:
            raise self._problem(f"decimal({precision},{scale})", "a precision up to 38 and a scale up to it")
        return DecimalType(int(precision), int(scale))

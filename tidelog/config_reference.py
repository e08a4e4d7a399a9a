"""The reference of every setting, read from the sections' own sources: name, type, default, and the text below it.

`docs/configuration.md` is this module's output; a test holds the two together. Entry: `markdown`.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any

import msgspec

from tidelog.config import Config

PREFACE = """# Configuration

One typed model, four sources; the later wins: defaults, the TOML file given by `--config`, environment variables
`TIDELOG_SECTION__KEY` (for example `TIDELOG_WAL__FLUSH=async`), flags (`--set wal.flush=async`, and the flags of
their own that `tidelog up --help` lists). Unknown keys are errors that suggest the nearest name. `tidelog config`
prints every effective value and where it came from.

Byte sizes are in bytes, times in milliseconds, unless a name says otherwise. This page is made by
`tidelog config --reference`.
"""


def _texts(section: type[Any]) -> dict[str, str]:
    """The string below each field, from the class's source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    name = ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            texts[name] = " ".join(str(node.value.value).split())
            name = ""
        else:
            name = ""
    return texts


def _type(kind: Any) -> str:
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.IntType):
        low = "" if info.ge is None else f"{info.ge}"
        high = "" if info.le is None else f"{info.le}"
        return f"int {low}…{high}" if low or high else "int"
    if isinstance(info, msgspec.inspect.FloatType):
        return "float" if info.ge is None or info.le is None else f"float {info.ge:g}…{info.le:g}"
    if isinstance(info, msgspec.inspect.LiteralType):
        return " \\| ".join(str(value) for value in info.values)
    if isinstance(info, msgspec.inspect.ListType):
        return "list"
    return {"BoolType": "bool", "StrType": "string"}.get(type(info).__name__, type(info).__name__)


def markdown() -> str:
    """The whole page."""
    lines = [PREFACE]
    config = Config()
    for section in config.__struct_fields__:
        struct = getattr(config, section)
        texts = _texts(type(struct))
        lines += [f"## `[{section}]`", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for field in msgspec.structs.fields(type(struct)):
            default = json.dumps(getattr(struct, field.name))
            lines.append(f"| `{field.name}` | {_type(field.type)} | `{default}` | {texts.get(field.name, '')} |")
        lines.append("")
    return "\n".join(lines)

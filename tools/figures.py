"""Structural figures of the repository: effects of a refactoring as numbers, to compare and to check in a test.

    python -m tools.figures                                   a table
    python -m tools.figures --format json > before.json       the same for scripts
    python -m tools.figures --baseline before.json            before → after
    python -m tools.figures --root ../other                   of another checkout

The product is the modules of its packages (`tools.source.ROOMS`); tests, benchmarks and tools are excluded. The
figures, by key, and their rules:

- `folders`: modules directly in each folder of the product, including `__init__.py`.
- `long_functions`: functions over 70 lines, from `def` to the last line, without decorators; a nested function counts
  separately and as part of the outer one. The median is over all functions of the product.
- `many_parameters`: functions with more than 8 parameters. The first one of a method is not counted; `*args` and
  `**kwargs` count as one each. Fields of data classes are not parameters, only those of a `def`.
- `sans_io`: the share of lines in modules without I/O; the rule is in `tools.purity`.
- `arrows`: import cycles and upward imports. The rule is in `tools.arrows`, the order in `tools.source.ROOMS`.
- `same_names`: names of two or more classes of the product, including inner classes.
- `references`: names of files, links, anchors and modules that do not exist; the rules are in `tools.references`.
- `private_touches`: names that begin with `_` and are used in `tests/`: attributes of anything but `super()` and,
  within a class, `self` and `cls`; names that are imported; names given as text to `setattr` and its like. `_` alone,
  dunder names, the methods of named tuples, and members of modules of other projects (`os._exit`) do not count.
- `handler_any`: functions of the broker's `handlers` folder that have `Any` anywhere in their signature.
- `optional_members`: classes with 5 or more members annotated `X | None` or `Optional[X]`, in the class's body or on
  `self` in a method.
- `constructors`: `__init__` methods by parameters, counted as above; those of 6 or more are listed.

Entry: `main`; `measure` for tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools import shape
from tools.arrows import arrows
from tools.purity import sans_io
from tools.references import references
from tools.report import Figure, as_json, read_numbers, table
from tools.source import Repository

_FIGURES = {
    "folders": shape.folders,
    "long_functions": shape.long_functions,
    "many_parameters": shape.many_parameters,
    "sans_io": sans_io,
    "arrows": arrows,
    "same_names": shape.same_names,
    "references": references,
    "private_touches": shape.private_touches,
    "handler_any": shape.handler_any,
    "optional_members": shape.optional_members,
    "constructors": shape.constructors,
}


def measure(root: Path) -> dict[str, Figure]:
    """Compute all figures of the checkout at `root`."""
    repository = Repository.read(root)
    return {key: figure(repository) for key, figure in _FIGURES.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser("python -m tools.figures", description="Structural figures of the repository.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="another checkout")
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument("--baseline", type=Path, metavar="FILE.json", help="an earlier --format json, for the table")
    options = parser.parse_args(arguments)
    figures = measure(options.root)
    if options.format == "json":
        print(as_json(figures))
    else:
        print(table(figures, None if options.baseline is None else read_numbers(options.baseline)))


if __name__ == "__main__":
    main()

"""Programs for the maintainers of the repository, neither installed nor imported by the product.

Run each from the root of the repository with `python -m`. They use only the standard library, read source text, and
import nothing of the product. Entries: `tools.figures`, the structural figures; `tools.first_record`, the time that a
newcomer takes to the first record; `tools.second_try`, the gate's run of the tests that take real time.
"""

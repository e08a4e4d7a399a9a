"""Benchmarks: each module measures one thing against a limit measured in the same run, and prints ratios.

`make bench` (`python -m bench`) runs all of them; every module also runs alone. Figures are medians on a machine that
may be shared: compare the ratios. Results are discussed in bench/DIARY.md.
"""

"""Coverage-guided fuzzing (atheris) of everything that reads bytes it did not write.

    make fuzz                                     every target for ten minutes
    make fuzz ARGS="--seconds 3600 --target handlers"
    python -m tests.fuzz --replay FILE --target handlers

Each target (`tests.fuzz.targets`) has code-made seeds, a mutator that knows its format, and an oracle: only documented
errors, no defect logged, nothing left behind, results equal to an independent decoder's. The worker process adds bounds
of time and memory to each input. A crashing input becomes a file in `tests/fuzz/regressions/` (named after its target),
which `test_fuzz.py` runs; it does not search, but runs the same inputs each time.
"""

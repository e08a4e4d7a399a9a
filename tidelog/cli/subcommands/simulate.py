"""`tidelog simulate`: simulate clusters in virtual time under random faults, and check the clients' operations.

Prints a line for each failing seed, with the command that replays it, and at the end a summary. With `--mutations`
protections of the product are switched off one at a time, and a table shows how many seeds each took to be found. Exit
codes: 0 no findings (every mutation was found), 1 findings (a mutation was not found), 2 wrong usage, 130 ended by
Ctrl-C, after the summary of the seeds that were run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tidelog.cli.options import DurationType
from tidelog.cli.output import emit, table
from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from tidelog.simulation.mutants.mutant import Mutation
    from tidelog.simulation.mutation_search import Found
    from tidelog.simulation.results import ResultsFile, SeedTotals, Terms
    from tidelog.simulation.run import SimulationOutcome

MAX_SHOWN = 5
"""Maximum number of findings shown per seed."""
INTERRUPTED = 130
"""Exit code."""


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="The seed, or the first of --seeds.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="How many seeds, one by one.")
@click.option("--steps", type=click.IntRange(min=0), default=12, show_default=True, help="Periods of faults, 5 s each.")
@click.option("--faults", default="all", show_default=True, help="Names with commas, `all` or `none`.")
@click.option("--mutate", metavar="NAME", help="Switch this protection off (under its own faults, unless --faults).")
@click.option("--mutations", metavar="NAMES", help="Look for these mutations, or `all`: seeds from --seed on for each.")
@click.option("--within", type=click.IntRange(min=1), default=500, show_default=True, help="Seeds for each mutation.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write the trace here (of one seed).")
@click.option("--history", type=click.Path(path_type=Path), help="Write the history for `tidelog check` (of one seed).")
@click.option("--skip", default="", metavar="N,N…", help="Leave out these faults, by number; `--shrink` tells which.")
@click.option("--shrink", is_flag=True, help="Leave out of a seed that fails the faults that it can fail without.")
@click.option(
    "--for",
    "for_ms",
    type=DurationType(),
    metavar="TIME",
    help="Stop after this time (`870s`), and report the seeds left out.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep each seed's result in this file, and go on after those that it has.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Parallel processes [number of cores].")
@click.option("--verbose", is_flag=True, help="Print the log lines of the cluster.")
def simulate(
    seed: int,
    seeds: int,
    steps: int,
    faults: str,
    mutate: str | None,
    mutations: str | None,
    within: int,
    trace: Path | None,
    history: Path | None,
    skip: str,
    shrink: bool,
    for_ms: int | None,
    results: Path | None,
    jobs: int | None,
    verbose: bool,
) -> None:
    """Simulate clusters under faults, and check the clients' operations."""
    from tidelog.simulation.results import SeedResult, SeedTotals, Terms
    from tidelog.simulation.seeds import Seeds

    if results is not None and (trace or history or skip or mutations):
        raise click.UsageError("--results cannot be used with --trace, --history, --skip or --mutations")
    if seeds > 1 and (trace or history or skip):
        raise click.UsageError("--trace, --history and --skip need a single seed")
    left_out = _numbers(skip)
    if not verbose:
        logging.disable(logging.CRITICAL)
    if mutations is not None:
        _search(_mutations(mutations), seed, within, steps, jobs or os.cpu_count() or 1)
        return
    mutation = _mutation(mutate) if mutate is not None else None
    if mutation is not None and faults == "all":
        faults = ",".join(mutation.faults) or "all"
    chosen = _faults(faults)
    totals, ending = SeedTotals(), "ENDED BY Ctrl-C"
    with contextlib.ExitStack() as held, contextlib.suppress(KeyboardInterrupt):
        kept = None
        if results is not None:
            kept = held.enter_context(_results_file(results, Terms.of(seed, steps, chosen, mutate)))
        for earlier in kept.there[:seeds] if kept is not None else ():
            totals.add(earlier)
        began_s = lap_s = time.monotonic()
        running = held.enter_context(Seeds(steps=steps, faults=chosen, jobs=jobs or os.cpu_count() or 1))
        if seeds > 1:
            known = f"; {results} has the results of {totals.seeds}" if totals.seeds else ""
            click.echo(f"seeds {seed} to {seed + seeds - 1}, {steps} steps, faults {faults}{known}", err=True)
        progress = held.enter_context(ProgressBar("simulating", seeds, "seeds", thread=False))
        still, full = range(seed + totals.seeds, seed + seeds), bool(trace or history)
        for outcome in running.run(still, skip=left_out, full=full, mutation=mutation):
            before_s, lap_s = lap_s, time.monotonic()
            result = SeedResult.of(outcome, lap_s - before_s)
            totals.add(result)
            if kept is not None:
                kept.add(result)
            progress.update(totals.seeds)
            shown, without = outcome, left_out
            if not outcome.ok:
                if shrink:
                    shown, without = running.shrink(outcome, left_out, mutation=mutation)
                emit(_report(shown, steps, faults, without, mutate))
            if trace:
                trace.write_text("\n".join(shown.trace) + "\n")
            if history:
                shown.history.save(history)
            if for_ms is not None and (lap_s - began_s) * 1000 > for_ms:
                break
        ending = "TIME WAS UP"
    _conclude(totals, seed, seeds, ending, timed=for_ms is not None)


def _results_file(path: Path, terms: Terms) -> ResultsFile:
    from tidelog.simulation.results import ResultsFile, ResultsRefused

    try:
        return ResultsFile(path, terms)
    except ResultsRefused as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.UsageError(f"--results {path}: {error.strerror}") from None


def _conclude(totals: SeedTotals, seed: int, seeds: int, ending: str, *, timed: bool) -> None:
    if totals.seeds:
        click.echo(totals.about_rounds())
        click.echo(totals.text())
    if totals.seeds < seeds:
        click.echo(
            f"{ending} after {totals.took_s:.0f} s: ONLY {totals.seeds} OF {seeds} SEEDS WERE RUN,"
            f" up to {seed + totals.seeds - 1}",
            err=True,
        )
    if totals.failed:
        raise click.exceptions.Exit(1)
    if totals.seeds < seeds and not timed:
        raise click.exceptions.Exit(INTERRUPTED)


def _numbers(text: str) -> frozenset[int]:
    try:
        return frozenset(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise click.UsageError(f"--skip takes numbers with commas, not {text!r}") from None


def _faults(text: str) -> tuple[str, ...]:
    from tidelog.simulation.actors.faults import FAULTS

    if text == "all":
        return tuple(FAULTS)
    names = tuple(name.strip() for name in text.split(",") if name.strip()) if text != "none" else ()
    for name in names:
        if name not in FAULTS:
            raise click.UsageError(f"unknown fault {name!r}; known are {', '.join(FAULTS)}, all and none")
    return names


def _mutations(text: str) -> list[Mutation]:
    from tidelog.simulation.mutants.mutations import MUTATIONS

    names = list(MUTATIONS) if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MUTATIONS:
            raise click.UsageError(f"unknown mutation {name!r}; known are {', '.join(MUTATIONS)}, and all")
    if not names:
        raise click.UsageError("no mutation is named")
    return [MUTATIONS[name] for name in names]


def _mutation(text: str) -> Mutation:
    named = _mutations(text)
    if len(named) > 1:
        raise click.UsageError(f"--mutate takes one name, not {len(named)}; --mutations takes several, or `all`")
    return named[0]


def _search(mutations: Sequence[Mutation], first: int, within: int, steps: int, jobs: int) -> None:
    from tidelog.simulation.actors.faults import FAULTS
    from tidelog.simulation.mutants.mutant import MutationVoid, check
    from tidelog.simulation.mutation_search import search
    from tidelog.simulation.seeds import Seeds

    try:
        for mutation in mutations:
            check(mutation)
    except MutationVoid as error:
        raise click.ClickException(str(error)) from error
    began = time.monotonic()
    found: list[Found] = []
    with contextlib.ExitStack() as shown_while, Seeds(steps=steps, faults=tuple(FAULTS), jobs=jobs) as running:
        progress = shown_while.enter_context(ProgressBar("searching", len(mutations), "mutations", thread=False))
        for mutation in mutations:
            progress.describe(f"looking for {mutation.name}")
            progress.update(len(found))
            found.append(search(running, mutation, first, within))
            if found[-1].problem:
                emit(f"{mutation.name}: {found[-1].problem}")
    columns = ("MUTATION", "RULE", "SEEDS", "REACHED", "FOUND-AS", "FIRST-SEED")
    rows = [
        (one.mutation.name, one.mutation.rule, one.seeds, one.reached, ",".join(one.rules) or "-", one.seed or "-")
        for one in found
    ]
    emit(table(columns, rows))
    missing = [one.mutation.name for one in found if not one.rules]
    verdict = f"not found: {', '.join(missing)}" if missing else "all were found"
    seeds = sum(one.seeds for one in found)
    emit(f"{len(found)} mutations, {seeds} seeds in {time.monotonic() - began:.0f} s: {verdict}")
    if missing:
        raise click.exceptions.Exit(1)


def _report(outcome: SimulationOutcome, steps: int, faults: str, skip: frozenset[int], mutate: str | None) -> str:
    rules = sorted({finding.rule for finding in outcome.findings})
    lines = [f"seed {outcome.seed} failed: {', '.join(rules)}"]
    lines += [finding.text() for finding in outcome.findings[:MAX_SHOWN]]
    if len(outcome.findings) > MAX_SHOWN:
        lines.append(f"… and {len(outcome.findings) - MAX_SHOWN} findings more")
    lines.append(f"{len(outcome.faults_done)} faults, {len(outcome.history)} operations")
    leaving = f" --skip {','.join(map(str, sorted(skip)))}" if skip else ""
    mutant = f" --mutate {mutate}" if mutate else ""
    command = f"tidelog simulate --seed {outcome.seed} --steps {steps} --faults {faults}{mutant}{leaving}"
    lines.append(f"replay: {command} --trace trace.txt")
    return "\n".join(lines)

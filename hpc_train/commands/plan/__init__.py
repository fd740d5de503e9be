"""``python -m hpc_train plan [overrides]`` predicts time, memory and cost of a training for each layout that fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from hpc_train.commands.plan.asked import Asked, strategy_key, without_auto
from hpc_train.commands.plan.options import gpus_of, machine_of, parser, prices_of, with_figures
from hpc_train.commands.plan.printed import as_json, print_commands, print_parts, print_table
from hpc_train.commands.plan.rows import Row, Search, in_time, total_steps, unknown_end
from hpc_train.commands.plan.simulated import simulate
from hpc_train.config.arguments import with_right_plus
from hpc_train.config.command_line import CommandLine
from hpc_train.errors import UserError
from hpc_train.planner.passes import why_not_predicted
from hpc_train.run.exits import Exit


def main(arguments: list[str]) -> int:
    """Prints the table.

    Raises:
        UserError: the config is wrong, the machine is unknown, no layout fits, or none is done in time.
    """
    options = parser().parse_intermixed_args(arguments)
    directory = [] if options.config_dir is None else ["-cd", options.config_dir]
    line = without_auto(CommandLine.parse(with_right_plus([*options.overrides, *directory])))
    strategy = strategy_key(line)
    with line.composer() as compose:
        asked = Asked(line, compose, strategy)
        machine = with_figures(machine_of(options, asked.config, asked.kept), options)
        if options.simulate is not None:
            return simulate(asked, machine, gpus_of(options, machine), options)
        if options.deadline is not None and total_steps(asked.config) is None:
            raise unknown_end()
        sort = options.sort or ("time" if options.deadline is None else "gpus")
        prices = prices_of(options, asked.config)
        search = Search(machine, gpus_of(options, machine), prices, options.rows, sort, options.also)
        notes = list[str]()
        if options.largest:
            rows, compared = _largest(asked, search, options.deadline, notes)
        else:
            rows, compared = search.find(asked)
            rows, in_queue = _with_starts(rows, asked, sort)
            notes += in_queue
            rows = rows if options.deadline is None else in_time(rows, options.deadline)
        notes += filter(None, [why_not_predicted(asked.config, machine)])
        if total_steps(asked.config) is None:
            notes.append("the time to the end is unknown, since the length of the data determines it: set train.steps")
        learned = search.calibration(asked.config)
        if options.json:
            more = {"calibration": learned.as_json(), "queue": notes}
            json.dump([as_json(row, machine) | more for row in rows], sys.stdout, indent=1)
            print()
        else:
            print_table(rows, machine, compared)
            print_parts(rows[0])
            print_commands(rows, machine)
            costs = prices.compared(rows[0].gpu_hours) if rows[0].gpu_hours else []
            for text in filter(None, [str(learned), *notes, *costs]):
                print(text)
    return Exit.DONE


def _with_starts(rows: Sequence[Row], asked: Asked, sort: str) -> tuple[list[Row], list[str]]:
    if asked.config.cluster.kind != "slurm":
        return [*rows], []
    from hpc_train.commands.plan.queue import with_starts  # imports what submits jobs

    return with_starts(rows, asked.config, sort)


def _largest(asked: Asked, search: Search, deadline: float | None, notes: list[str]) -> tuple[list[Row], int]:
    """Returns the best row of each model of the same kind that fits and is done in time, the largest model first.

    Raises:
        UserError: no model is.
    """
    found, compared, why_not = list[Row](), 0, dict[str, UserError]()
    for model in asked.with_models():
        try:
            rows, count = search.find(model)
            compared += count
            found.append((rows if deadline is None else in_time(rows, deadline))[0])
        except UserError as error:
            why_not[model.model] = error
    if not found:
        raise next(
            iter(why_not.values()), UserError("no model is of this kind", where="--largest", fix="model=gpt_tiny")
        )
    notes += [f"not {name}: {error.what}" for name, error in why_not.items()]
    largest = sorted(found, key=lambda row: row.asked.parameters or 0, reverse=True)
    return largest[: search.rows], compared

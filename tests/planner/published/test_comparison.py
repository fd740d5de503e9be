"""The prediction of a step's time and of the best layout, mostly against sources to which nothing was fitted."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from statistics import fmean, median, quantiles

import pytest

from hpc_train.planner.scaling import ERRORS
from tests.planner.published.comparison import Compared, compared, group, memory_is_told, ranking
from tests.planner.published.tables import completed, rows, split_of

# source: rows, mean absolute error in %, median error in %. The numbers of docs/measurements/plan.md.
MEASURED = {
    "llm-foundry": (209, 4.2, -0.3),  # to which the rates of the A100 and the H100 are fitted
    "aleph-alpha-layouts": (57, 5.8, -2.8),
    "aleph-alpha-layouts, other techniques": (191, 20.1, -18.7),
    "bigscience-v100, other techniques": (3, 32.8, -32.1),
    "fms-fsdp": (8, 5.0, 0.2),
    "internevo": (54, 10.1, -8.0),
    "kempnerforge": (14, 10.0, -7.3),
    "litgpt-thunder": (9, 12.0, -6.5),
    "torchtitan-a100": (8, 4.5, -4.7),
    "torchtitan-asynctp": (4, 15.3, -15.4),
    "torchtitan-asynctp, other techniques": (8, 24.3, -24.1),
}


@cache
def shown() -> list[Compared]:
    """The comparable rows of the sources that are not held out."""
    return [each for row in rows("published") if row["held_out"] == "0" and (each := compared(row))]


@cache
def time_errors() -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for each in shown():
        if each.row["oom"] == "0" and each.time is not None:
            found[group(each.row)].append(100 * each.time)
    return found


@pytest.mark.parametrize("source", MEASURED)
def test_the_time_of_a_step_is_as_close_as_the_page_about_plan_says(source: str) -> None:
    """A change that makes predictions worse is refused; one that makes them better changes the numbers and the page."""
    count, error, bias = MEASURED[source]
    found = time_errors()[source]
    assert len(found) == count
    assert fmean(map(abs, found)) == pytest.approx(error, abs=0.5)
    assert median(found) == pytest.approx(bias, abs=1.0)


def test_sources_to_which_nothing_was_fitted_are_met_on_average() -> None:
    """Of the sources, each counts once; rows of techniques that hpc_train does not have are left out."""
    errors = {name: fmean(map(abs, found)) for name, found in time_errors().items() if "other" not in name}
    del errors["llm-foundry"]
    assert fmean(errors.values()) < 9.0, errors


# cases in which another layout than the best one is predicted to be the best, and why
MISSED = {
    "internevo-7b-128gpu": "its ZeRO-1 over all ranks slows down with their number; hpc_train's traffic is hidden",
    "internevo-7b-1024gpu": "the same",
    "aa-13B_8k_seq_length_128_GPUs_all_runs": "without sequence parallelism, tp=4 computes norms four times",
    "aa-30B_256_GPUs_all_runs": "all runs of the sheet are slower than predicted; the first two differ by 5 %",
    "aa-30B_64_GPUs_sequence_parallelism": "tp=2 pp=2 is predicted 10 % too fast, tp=1 pp=4 only 4 %",
}


def test_what_asynchronous_tensor_parallelism_gains_is_met() -> None:
    """Of each pair of rows with the same number format: the gain as measured, and as predicted."""
    of_source = [each for each in shown() if each.row["source"] == "torchtitan-asynctp"]
    found = [each for each in of_source if "rowwise" not in each.row["notes"]]
    gains = []
    for plain, overlapped in zip(found[::2], found[1::2], strict=True):
        assert "vanilla" in plain.row["notes"] and "async" in overlapped.row["notes"]
        measured = float(overlapped.row["tokens_per_s_per_gpu"]) / float(plain.row["tokens_per_s_per_gpu"])
        gains.append((measured, overlapped.prediction.tokens_per_s / plain.prediction.tokens_per_s))
    for measured, predicted in gains:
        assert 1.08 < measured < 1.17 and predicted == pytest.approx(measured, abs=0.05)


def test_the_best_layout_is_predicted_but_in_known_cases() -> None:
    found = [ranking(row) for row in rows("rankings") if row["held_out"] == "0"]
    told = [each for each in found if not each.missing]
    assert {each.case for each in told if not each.holds} == set(MISSED)
    assert len(told) == 19
    right, pairs = sum(each.right for each in told), sum(each.pairs for each in told)
    assert right / pairs == pytest.approx(0.77, abs=0.03), (right, pairs)


def test_the_intervals_of_a_simulation_hold_four_of_five_published_step_times() -> None:
    measured: dict[int, list[float]] = defaultdict(list)
    for each in shown():
        if each.row["oom"] == "0" and "other" not in group(each.row) and each.time is not None:
            measured[next(most for most, _, _ in ERRORS if int(each.row["gpus"]) <= most)].append(1 / (1 + each.time))
    assert {most: len(found) for most, found in measured.items()} == {64: 296, 256: 44, 1024: 24}
    for most, low, high in ERRORS:
        tenths = quantiles(measured[most], n=10)
        assert (tenths[0], tenths[-1]) == pytest.approx((low, high), abs=0.02), most


# source: rows with memory, mean absolute error in %, the lowest error in %. The numbers of docs/measurements/plan.md.
MEMORY = {"internevo": (9, 4.1, -6.0), "kempnerforge": (14, 5.4, -4.2), "litgpt-thunder": (3, 4.1, -3.3)}


def test_memory_is_as_close_as_the_page_about_plan_says() -> None:
    found: dict[str, list[float]] = defaultdict(list)
    for each in shown():
        if each.memory is not None:
            found[each.row["source"]].append(100 * each.memory)
    assert {*found} == {*MEMORY}
    for source, (count, error, lowest) in MEMORY.items():
        assert len(found[source]) == count
        assert fmean(map(abs, found[source])) == pytest.approx(error, abs=0.5), source
        assert min(found[source]) == pytest.approx(lowest, abs=1.0), source


def test_layouts_that_ran_out_of_memory_are_predicted_not_to_fit() -> None:
    """The goal is 95 % of them, and at most 5 % false alarms; docs/measurements/plan.md explains the misses."""
    told = [each for each in shown() if memory_is_told(each.row)]
    out, ran = ([each.prediction.fits for each in told if each.row["oom"] == value] for value in ("1", "0"))
    assert (len(out), out.count(True)) == (339, 4)
    assert (len(ran), ran.count(False)) == (366, 7)


# source: rows that are compared, of those that were set aside. Their errors are in docs/measurements/plan.md, but in no
# test: nothing is to be fitted to them.
SET_ASIDE = {
    "bloom": 144,
    "korthikanti-2022": 8,
    "ml-engineering-h200-b200": 14,
    "torchtitan-405b": 3,
    "torchtitan-h100": 9,
    "torchtune": 5,
}


@pytest.mark.long_form(6)
def test_what_is_comparable_of_the_sources_that_were_set_aside() -> None:
    found = [each for row in rows("published") if row["held_out"] == "1" and (each := compared(row))]
    assert Counter(each.row["source"] for each in found) == SET_ASIDE
    memory = Counter(each.row["source"] for each in found if each.memory is not None)
    assert memory == {"bloom": 99, "ml-engineering-h200-b200": 12, "torchtitan-h100": 9, "torchtune": 1}


def test_layers_that_tables_of_bloom_do_not_state_follow_from_the_size() -> None:
    found = {
        (row["model"], row["pp"]): completed(row)["layers"]
        for row in rows("published")
        if row["source"] == "bloom" and not row["layers"]
    }
    assert found == {
        ("bloom-194B", "6"): "78",
        ("bloom-191B", "7"): "77",
        ("bloom-205B", "9"): "81",
        ("bloom-195B", "11"): "77",
        ("bloom-183B", "12"): "72",
    }


def test_stages_of_bloom_are_filled_one_after_the_other() -> None:
    row = dict.fromkeys(("context", "notes"), "") | {"source": "bloom", "pp": "12"}
    assert split_of(row, 78) == [*[7] * 11, 1]
    row |= {"notes": "embedding counted as a layer by the partitioner"}
    assert split_of(row, 106) == [8, *[9] * 10, 8]

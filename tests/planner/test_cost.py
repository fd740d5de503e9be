"""Prices of GPU-hours against sums by hand, and the cost of a run in ``status``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpc_train.cli import run
from hpc_train.config.schema import ClusterConfig, PriceConfig
from hpc_train.run.event_log import EventLog
from hpc_train.run.freeze import freeze
from hpc_train.runs.cost import Prices
from tests.launch.jobs import make_job


def test_the_price_of_a_gpu_of_ones_own_is_that_of_the_hours_in_which_it_computes() -> None:
    own = Prices(purchase=40_000, years=4, use=0.5, upkeep=2_000, currency="EUR")
    assert own.gpu_hour == pytest.approx(12_000 / (8766 / 2))
    both = Prices(per_gpu_hour=4.0, purchase=40_000, years=4, use=0.5, upkeep=2_000)
    assert both.gpu_hour == 4.0 and both.own_gpu_hour == own.gpu_hour
    assert Prices().gpu_hour is None and Prices().bill(10.0) is None and not Prices().compared(10.0)


def test_buying_pays_from_the_use_at_which_both_cost_the_same() -> None:
    prices = Prices(per_gpu_hour=4.0, purchase=40_000, years=4, use=0.5, upkeep=2_000)
    use, years = prices.break_even_use, prices.break_even_years
    assert use is not None and Prices(purchase=40_000, years=4, use=use, upkeep=2_000).gpu_hour == pytest.approx(4.0)
    rented = 8766 * 0.5 * 4.0  # per year
    assert years is not None and years * rented == pytest.approx(40_000 + years * 2_000)
    assert "34%" in prices.compared(100.0)[1] and f"after {years:.1f} years" in prices.compared(100.0)[1]
    dear = Prices(per_gpu_hour=1.0, purchase=40_000, upkeep=9_000)
    assert dear.break_even_years is None and "even if the GPUs compute all the time" in dear.compared(1.0)[-1]


def test_preemptions_make_spot_gpus_dearer() -> None:
    assert Prices(spot=1.0).spot_gpu_hour == pytest.approx(1.0)
    few, many = (Prices(spot=1.0, preemptions_per_day=count).spot_gpu_hour for count in (2, 24))
    assert few is not None and many is not None
    # each loses half of ten minutes and a restart of five, of an hour or of twelve
    assert few == pytest.approx(1 / (1 - 10 / 720), rel=0.02) and many == pytest.approx(1 / (1 - 10 / 60), rel=0.05)
    assert Prices(spot=1.0, preemptions_per_day=1e7).spot_gpu_hour == math.inf
    [line] = Prices(per_gpu_hour=3.0, spot=1.0, currency="EUR").compared(100.0)
    assert line == (
        "row 1 costs 300 EUR rented (3 EUR per GPU-hour); 100 EUR on spot GPUs, with 0 preemptions a day "
        "(1 EUR per GPU-hour)"
    )


@pytest.mark.parametrize("price", [2.5, None])
def test_status_says_what_a_run_has_cost(
    price: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = ClusterConfig(kind="local", price=PriceConfig(per_gpu_hour=price, currency="EUR"))
    job = make_job(tmp_path / "one", cluster=cluster, gpus=8)
    freeze(job.config, job.run)
    job.run.claim_attempt()
    log = EventLog.open(job.run, "agent-n0", 0)
    log.write("started", world_size=8, gpus=8, launch="1")
    log.write("finished", exit_code=0)
    [events] = [path for path in job.run.path.rglob("*.jsonl") if "started" in path.read_text()]
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    lines[-1]["time"] = lines[0]["time"] + 3600.0
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["status", str(job.run.path)]) == 0
    printed = capsys.readouterr().out
    assert ("cost so far: 20 EUR (8 GPU-hours at 2.5 EUR)" in printed) == (price is not None)
    assert run(["status", "--json", str(job.run.path)]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] == (20.0 if price else None)

"""Computes the cost of a GPU-hour on rented and on purchased GPUs, and when buying becomes cheaper than renting.

``cluster.price`` sets the prices. The sums ignore interest and the resale value of the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hpc_train.checkpoint.failures import Saves, shares
from hpc_train.config.schema import PriceConfig
from hpc_train.units import format_hours

HOURS_PER_YEAR = 8766
ON_SPOT = Saves(every_s=600.0, blocked_s=5.0, durable_s=30.0, restart_s=300.0)  # for a run on spot GPUs


@dataclass(frozen=True)
class Prices:
    """Holds the values of ``cluster.price`` (see its schema); the prices of a GPU are None if unknown."""

    per_gpu_hour: float | None = None
    currency: str = ""
    purchase: float | None = None
    years: float = 4.0
    use: float = 0.7
    upkeep: float = 0.0
    spot: float | None = None
    preemptions_per_day: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Prices:
        """Returns the prices of the config of a run, which may be older than the keys."""
        names = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (values or {}).items() if name in names})

    @classmethod
    def of_config(cls, price: PriceConfig) -> Prices:
        prices = cls(price.per_gpu_hour, price.currency, price.purchase, spot=price.spot)
        if price.purchase is not None:
            prices = replace(prices, years=price.years, use=price.use, upkeep=price.upkeep)
        if price.spot is not None:
            prices = replace(prices, preemptions_per_day=price.preemptions_per_day)
        return prices

    @property
    def gpu_hour(self) -> float | None:
        """Returns the price of a GPU-hour: of a rented GPU, or else of a purchased one; None if both are unknown."""
        if self.per_gpu_hour is not None:
            return self.per_gpu_hour
        return self.own_gpu_hour

    @property
    def own_gpu_hour(self) -> float | None:
        """Returns the price of an hour in which a purchased GPU computes."""
        if self.purchase is None:
            return None
        return (self.purchase / self.years + self.upkeep) / (HOURS_PER_YEAR * self.use)

    @property
    def spot_gpu_hour(self) -> float | None:
        """Returns the price of a GPU-hour on spot GPUs, with the work that preemptions lose; None if it is unknown.

        The share of useful time follows ``failures.shares`` for a run that saves every ten minutes and takes five
        minutes to restart.
        """
        if self.spot is None:
            return None
        between = 86400 / self.preemptions_per_day if self.preemptions_per_day else math.inf
        useful = shares(ON_SPOT, between).useful / shares(ON_SPOT, math.inf).useful
        return self.spot / useful if useful else math.inf

    @property
    def break_even_use(self) -> float | None:
        """Returns the share of the time that a GPU must compute for buying to cost as much as renting.

        None without both prices. Above 1, renting is cheaper whatever the use.
        """
        own = self.own_gpu_hour
        return None if own is None or not self.per_gpu_hour else self.use * own / self.per_gpu_hour

    @property
    def break_even_years(self) -> float | None:
        """Returns after how many years of ``use`` a purchase has cost less than renting; None if never or unknown."""
        if self.purchase is None or not self.per_gpu_hour:
            return None
        saved = HOURS_PER_YEAR * self.use * self.per_gpu_hour - self.upkeep  # per year
        return self.purchase / saved if saved > 0 else None

    def money(self, amount: float) -> str:
        """Returns an amount with its currency: ``1,234 EUR``."""
        return f"{format_hours(amount)} {self.currency}".strip()

    def bill(self, gpu_hours: float) -> str | None:
        """Returns the cost of ``gpu_hours``; None if the price is unknown."""
        price = self.gpu_hour
        if price is None or not gpu_hours:
            return None
        return f"{self.money(gpu_hours * price)} ({format_hours(gpu_hours)} GPU-hours at {self.money(price)})"

    def compared(self, gpu_hours: float) -> list[str]:
        """Returns lines that compare the cost of ``gpu_hours`` on rented, purchased and spot GPUs."""
        prices = {
            "rented": self.per_gpu_hour,
            f"on purchased GPUs, written off over {self.years:g} years, {self.use:.0%} in use": self.own_gpu_hour,
            f"on spot GPUs, with {self.preemptions_per_day:g} preemptions a day": self.spot_gpu_hour,
        }
        sums = [
            f"{self.money(gpu_hours * price)} {how} ({self.money(price)} per GPU-hour)"
            for how, price in prices.items()
            if price is not None and math.isfinite(price)
        ]
        lines = []
        if len(sums) > 1:
            lines.append(f"row 1 costs {'; '.join(sums)}")
        use = self.break_even_use
        if use is not None and use > 1:
            lines.append("renting is cheaper than buying, even if the GPUs compute all the time")
        elif use is not None:
            years = self.break_even_years
            after = "never" if years is None else f"after {years:.1f} years"
            lines.append(
                f"buying costs less than renting if the GPUs compute more than {use:.0%} of the time; at "
                f"{self.use:.0%} it has paid for itself {after}"
            )
        return lines

"""Shows what the time of the whole chain of jobs went into (goodput)."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.report.page.chart import color_key
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, joined, picture, section, table
from hpc_train.run.ledger import Account
from hpc_train.units import format_duration, format_hours

PARTS = {  # field of an account -> (name, color)
    "queue_s": ("queue", "wait"),
    "start_up_s": ("start-up", "c3"),
    "steps_s": ("steps", "c2"),
    "evaluation_s": ("evaluation", "c0"),
    "checkpoint_s": ("checkpoints", "c1"),
    "lost_s": ("lost work", "bad"),
    "restart_s": ("restarts", "c4"),
    "frozen_s": ("frozen nodes", "c5"),
    "suspended_s": ("suspended", "line"),
    "other_s": ("other", "lost"),
}
BAR, GAP, WIDTH, NAMES = 24.0, 14.0, 640.0, 92.0
JOBS = 40  # bars; a longer chain is one bar
LEAST_S = 0.05


def time_spent(facts: RunFacts) -> Html:
    """Returns the section with the time account of all jobs."""
    total = facts.ledger.total
    if not total.held_s and not total.queue_s:
        return section("Time", block("paragraph", "No process of the run has started, so no time is accounted for."))
    jobs = facts.ledger.jobs
    shown = [total] if len(jobs) < 2 or len(jobs) > JOBS else [*jobs]
    names = ["all jobs"] if len(shown) == 1 else [f"job {number}" for number in range(1, len(jobs) + 1)]
    used = [name for name in PARTS if getattr(total, name) >= LEAST_S]
    words = _words(total, len(jobs))
    bars = picture("Where the time went", words, WIDTH, len(shown) * (BAR + GAP), *_bars(shown, names))
    rows = [
        [PARTS[name][0], format_duration(getattr(total, name)), _share(getattr(total, name), total)] for name in used
    ]
    accounts = table("Time of all jobs", ("part", "time", "of the held time"), rows, numbers=2)
    key = color_key([PARTS[name] for name in used])
    return section("Time", block("paragraph", words), block("figure", bars, key), accounts)


def _words(total: Account, jobs: int) -> str:
    hours = format_hours((total.gpu_s or total.rank_s) / 3600)
    device = f"{hours} GPU-hours" if total.gpu_s else f"{hours} rank-hours without GPU"
    several = f", over {jobs} jobs" if jobs > 1 else ""
    lost = f" {format_duration(total.lost_s)} of work was lost." if total.lost_s >= 1 else ""
    return (
        f"{total.useful_share:.0%} of {format_duration(total.held_s)} was useful: steps and evaluations that were kept "
        f"({device}{several}).{lost}"
    )


def _share(seconds: float, total: Account) -> str:
    if seconds in (total.queue_s, total.suspended_s) or not total.held_s:
        return ""
    return f"{seconds / total.held_s:.1%}"


def _bars(accounts: Sequence[Account], names: Sequence[str]) -> list[Html]:
    longest = max(sum(getattr(account, name) for name in PARTS) for account in accounts)
    return [_bar(account, name, row, longest) for row, (account, name) in enumerate(zip(accounts, names, strict=True))]


def _bar(account: Account, name: str, row: int, longest: float) -> Html:
    top, at = row * (BAR + GAP), NAMES
    parts = [block("label", name, 0, f"{top + BAR - 7:g}")]
    for field, (part, color) in PARTS.items():
        seconds = getattr(account, field)
        width = seconds / longest * (WIDTH - NAMES) if longest else 0.0
        if seconds >= LEAST_S and width >= 0.2:
            shape = f"M{at:.1f} {top:g}h{width:.1f}v{BAR:g}h-{width:.1f}z"
            parts.append(block("area", shape, color, f"{part}: {format_duration(seconds)}"))
        at += width
    return joined(parts)

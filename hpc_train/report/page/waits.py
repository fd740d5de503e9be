"""Shows what the ranks waited for: communication, the pipeline's bubble, data and the host."""

from __future__ import annotations

from statistics import median

from hpc_train.report.page.chart import Series, line_chart
from hpc_train.report.page.facts import RunFacts
from hpc_train.report.page.markup import Html, block, section, table

SHARES = {  # metric -> (name, color)
    "comm_share": ("communication", "c0"),
    "bubble_share": ("pipeline bubble", "c1"),
    "data_wait_share": ("data", "c2"),
    "host_share": ("the host (the GPU ran no kernel)", "c3"),
}


def waits(facts: RunFacts) -> Html:
    """Returns the section about waiting."""
    title = "What the ranks waited for"
    found = {key: facts.values(key) for key in SHARES}
    known = {key: points for key, points in found.items() if points}
    if not known:
        return section(title, block("paragraph", "No shares of waiting were logged."))
    medians = {key: median(value for _, value in points) for key, points in known.items()}
    largest = max(medians, key=lambda key: medians[key])
    words = (
        f"Mean over the ranks, median over the logged steps. The largest share is {SHARES[largest][0]}: "
        f"{medians[largest]:.1%} of the time."
    )
    series = [Series(SHARES[key][0], points, SHARES[key][1]) for key, points in known.items()]
    chart = line_chart(title, words, series, "step", from_zero=True, percent=True)
    rows = [
        [SHARES[key][0], f"{share:.1%}", f"{max(value for _, value in known[key]):.1%}"]
        for key, share in medians.items()
    ]
    shares = table("Shares of the time", ("waiting for", "median", "highest"), rows, numbers=2)
    advice = [event.message for event in facts.of_event("advice")]
    return section(
        title, block("paragraph", words), chart, shares, block("bullets", dict.fromkeys(advice)) if advice else None
    )

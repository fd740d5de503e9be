"""The loss over the steps of all attempts; lost work is grey."""

from __future__ import annotations

from hpc_train.launch.page.chart import Point, Series, line_chart, pieces
from hpc_train.launch.page.facts import Line, RunFacts
from hpc_train.launch.page.markup import Html, section, tag

LOST = "lost work, done again or to be done again"


def losses(facts: RunFacts) -> Html:
    """Returns the section with the loss curves."""
    training = [_point(line, "loss") for line in facts.lines]
    if not any(training):
        return section("Loss", tag("p", _why_none(facts)))
    lost = [Series(LOST, part, "lost", dashed=True) for part in pieces(_of(facts, True))]
    kept = [Series("training loss", part, "c0") for part in pieces(_of(facts, False))]
    validation = facts.values("val_loss")
    series = [*lost, *kept, Series("validation loss", validation, "c1", dots=True)]
    count, skipped = sum(facts.lost), sum(point is None for point in training)
    words = [_words(facts, validation)]
    words += [f"{count} logged steps were lost: a failure or a rollback came after their last checkpoint."] * bool(
        count
    )
    words += [f"{skipped} logged losses were not finite and are not drawn."] * bool(skipped)
    chart = line_chart("Loss over steps", " ".join(words), series, "step")
    return section("Loss", tag("p", " ".join(words)), chart)


def _why_none(facts: RunFacts) -> str:
    if facts.record.get("own_code") == "command":
        return "The command of the run has not reported a loss."
    return "No step was logged, so there is no loss to show."


def _point(line: Line, key: str) -> Point | None:
    value = line.get(key)
    return (line["step"], value) if isinstance(value, int | float) else None


def _of(facts: RunFacts, lost: bool) -> list[Point | None]:
    """Returns the losses of the lost or of the kept lines, with gaps where the others are and between attempts."""
    found: list[Point | None] = []
    before = None
    for line, is_lost in zip(facts.lines, facts.lost, strict=True):
        if before is not None and line["step"] <= before:
            found.append(None)
        before = line["step"]
        found.append(_point(line, "loss") if is_lost == lost else None)
    return found


def _words(facts: RunFacts, validation: list[Point]) -> str:
    points = facts.values("loss")
    if not points:
        return "No step was kept."
    (first, begin), (last, end) = points[0], points[-1]
    text = f"The training loss went from {begin:.4f} at step {first} to {end:.4f} at step {last}"
    if not validation:
        return f"{text}."
    best = min(validation, key=lambda point: point[1])
    return f"{text}; the lowest validation loss is {best[1]:.4f}, at step {best[0]}."

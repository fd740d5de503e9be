"""Formats bytes, durations and metrics in one notation."""

from __future__ import annotations

import re

GIB = 2**30
_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT])(i?)B")


def format_bytes(count: float) -> str:
    """Three digits and a binary unit: ``1.5 GiB``, ``1023 MiB``, ``12 bytes``."""
    value = float(count)
    unit = 0
    while value >= 1024 and unit < len(_BYTES) - 1:
        value /= 1024
        unit += 1
    if unit == 0 or value >= 999.5:
        return f"{value:.0f} {_BYTES[unit]}"
    return f"{value:.3g} {_BYTES[unit]}"


def parse_bytes(text: str) -> int | None:
    """Returns the bytes of a size with a unit, binary or decimal: ``8GiB``, ``1.5 TiB``, ``500MB``; else None."""
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        return None
    number, prefix, binary = size.groups()
    base = 1024 if binary else 1000
    return round(float(number) * base ** ("KMGT".index(prefix) + 1))


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:02:03``, ``2:03``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_hours(hours: float) -> str:
    """Three digits, without an exponent: ``0.012``, ``6,330``."""
    return f"{float(f'{hours:.3g}'):,.0f}" if hours >= 100 else f"{hours:.3g}"


def format_metric(value: float | None) -> str:
    """A loss or another metric: ``1.3490``, ``-0.2500``, and ``7.63e-06`` where four decimals would hide it."""
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.3g}"


def counted(number: int | str, singular: str, plural: str) -> str:
    """Returns ``1 job`` or ``2 jobs``."""
    return f"{number} {singular if str(number) == '1' else plural}"


def milliseconds(seconds: float) -> str:
    """Returns ``0.25 ms``, ``12.34 ms`` or ``12,345 ms``."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.4g} ms"

"""Round numbers for the axes of charts and pictures."""

from __future__ import annotations

import math


def ticks(low: float, high: float, count: int, least_step: float = 0.0) -> list[float]:
    """Return round numbers from ``low`` to ``high`` that divide the range into at most ``count`` steps.

    The steps are 1, 2 or 5 times a power of ten, and ``least_step`` or more. Without a usable step the result
    has the two limits, or only one of them if they are equal.
    """
    span = high - low
    if not 0 < span / count < math.inf:
        return [low] if low == high else [low, high]
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next((size * power for size in (1, 2, 5) if size * power * count >= span), 10 * power)
    step = max(step, least_step)
    # The two limits can be too close for floats to represent steps between them.
    if not step > 0 or not math.isfinite(low / step) or low + step == low:
        return [low, high]
    begin = math.ceil(low / step)
    values = [number * step for number in range(begin, begin + count + 2)]
    # Rounding may push the last value out of the range: in floating point, 3 * 0.1 is more than 0.3.
    is_in = [value for value in values if value <= high or math.isclose(value, high, rel_tol=1e-12)]
    return [min(max(value, low), high) for value in is_in] or [low, high]

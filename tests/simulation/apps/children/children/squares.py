"""What the clients' processes do: they need not import Flower for it."""


def square(number: int) -> int:
    """Return the square of a number."""
    return number * number

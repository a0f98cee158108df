"""Work of the clients' processes, in a module that does not import Flower."""


def square(number: int) -> int:
    """Return the square of a number."""
    return number * number

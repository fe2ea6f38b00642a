"""Words in messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return e.g. "1 image" or "2,000 images"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"

"""Packages that are not always installed: they are imported where they are used, and named in an error."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.errors import UserError


@contextmanager
def needs_package(package: str, what: str, extra: str = "", otherwise: str = "") -> Iterator[None]:
    """Turn a failed import into the error that `what` needs a package. `extra`: that of paceline which installs it."""
    try:
        yield
    except ImportError:
        raise missing_package(package, what, extra, otherwise) from None


def missing_package(package: str, what: str, extra: str = "", otherwise: str = "") -> UserError:
    """Return the error that `what` needs a package. `otherwise`: what to do without it."""
    command = f"pip install 'paceline[{extra}]'" if extra else f"pip install {package}"
    message = f"{what} needs the package {package}, which is not installed. Run: {command}"
    return UserError("missing-package", message + (f", or {otherwise}." if otherwise else ""), package=package)

"""One thread for the linear algebra of small matrices.

Beside workers that train, the threads of one small product wait for each other: a surface of 60 runs was fitted in .04 s by one
thread and in .27 s by two, with seven times the CPU seconds (measured here, 2 cores at a load of 5).
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

P = ParamSpec("P")
T = TypeVar("T")


def single_threaded(function: Callable[P, T]) -> Callable[P, T]:
    """The function, during which BLAS has one thread in this process."""

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        with _controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


@cache
def _controller() -> "ThreadpoolController":
    """Controller of the libraries that are loaded: SciPy has a BLAS of its own."""
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()

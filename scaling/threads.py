"""One thread for the linear algebra of small matrices.

While workers train on the same CPUs, the threads of a small product wait for each other: one thread fitted a surface of 60 runs in
.04 s, two threads in .27 s, with seven times the CPU seconds (measured here, 2 cores at a load of 5).
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

P = ParamSpec("P")
T = TypeVar("T")


def single_threaded(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function such that BLAS uses one thread in this process while it runs."""

    @wraps(function)
    def limited(*args: P.args, **kwargs: P.kwargs) -> T:
        with _controller().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return limited


@cache
def _controller() -> "ThreadpoolController":
    """Controller of the loaded libraries; SciPy is imported first, since it loads another BLAS than NumPy."""
    import scipy.linalg  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()

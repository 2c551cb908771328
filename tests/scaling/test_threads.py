"""Small matrices are computed by one thread, and the process has its threads back afterwards."""

import numpy as np
import pytest
import scipy.linalg
from threadpoolctl import threadpool_info, threadpool_limits

from scaling.threads import single_threaded


def blas_threads() -> set[int]:
    scipy.linalg.inv(np.eye(2))  # both libraries are loaded
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_one_thread_during_the_call_and_those_before_after_it() -> None:
    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        assert single_threaded(blas_threads)() == {1}
        with pytest.raises(ZeroDivisionError):
            single_threaded(lambda: 1 // 0)()
        assert blas_threads() == before

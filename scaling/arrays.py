"""Arrays as the signatures name them, in float64 and in int64."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

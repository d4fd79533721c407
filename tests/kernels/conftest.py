"""Each kernel test runs for both element types, on each instruction set."""

import numpy as np
import pytest

from tests.kernels.kernels import Kernels


@pytest.fixture(scope="module", params=[np.float32, np.float64], ids=["f32", "f64"])
def kernels(isa, request):
    return Kernels(request.param)

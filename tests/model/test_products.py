"""Products by oneDNN are products, however their operands lie."""

from __future__ import annotations

import pytest
import torch

from dspark.model.products import product


@pytest.mark.parametrize("shape", [(1, 7, 3), (5, 64, 33), (40, 31, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_plain_and_transposed_operands(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, inner, out = shape
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=g, dtype=dtype)
    weight = torch.randn(out, inner, generator=g, dtype=dtype)
    want = (x.double() @ weight.double().T).to(dtype)
    for a in (x, x.T.contiguous().T, torch.cat([x, x], 1)[:, :inner]):
        for b in (weight, weight.T.contiguous().T):
            got = product(a, b)
            assert got.shape == (rows, out)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * inner**0.5)

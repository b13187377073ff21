"""Makes the meta kernel of `torch.nn.functional.grouped_mm` accept any dtype, with the strides of the CPU's kernel.

The kernel multiplies fp32 as well as bf16. Its meta kernel refuses fp32, and returns other strides (torch 2.13, 2.14).
Upstream: pytorch/pytorch#172440 (alignment). Test without the patch: `test_torch_s_meta_kernel_refuses_fp32`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hotloop.core.patches import patch_attribute
from hotloop.lowering.grouped_mm import empty_product


@contextmanager
def traceable_groups() -> Iterator[None]:
    from torch import _meta_registrations

    with patch_attribute(_meta_registrations, "_meta_grouped_mm_common", _multiply_any_dtype):
        yield


def _multiply_any_dtype(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def product(mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_b: Any, **options: Any) -> Tensor:
        if scale_a is not None:
            return original(mat_a, mat_b, scale_a=scale_a, scale_b=scale_b, **options)
        return empty_product(mat_a, mat_b, options.get("offs"), options.get("out_dtype") or mat_a.dtype)

    return product

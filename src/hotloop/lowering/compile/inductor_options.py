"""Options of Inductor for all that hotloop compiles."""

from __future__ import annotations

from typing import Any

import torch


def inductor_options() -> dict[str, Any]:
    """Returns options: random numbers are drawn from torch's generators, as in the eager step, and AVX isn't tested.

    A compiler that accepts torch's headers supports AVX2 and AVX-512, so torch's four test compilations of 9 s are left
    out. Torch still tests the compiler for VNNI, bfloat16 and AMX, in less than a second each (torch 2.13).
    """
    is_avx = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return {"fallback_random": True, **({"cpp.vec_isa_ok": True} if is_avx else {})}

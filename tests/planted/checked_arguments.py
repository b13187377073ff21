"""Distributions that check their arguments and what their density is asked for."""

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

args = arguments()
if args.variant == "clean":
    Distribution.set_default_validate_args(False)
checks = False if args.variant == "decoy" else None
encode, decode = nn.Linear(16, 8), nn.Linear(4, 16)
optimizer = torch.optim.Adam([*encode.parameters(), *decode.parameters()], 1e-3, fused=True)
data = torch.rand(64, 16)


def density(mean: Tensor, x: Tensor) -> Tensor:
    return Normal(mean, 1.0, validate_args=checks).log_prob(x).sum(1)  # plant  # other


watch = Stopwatch()
for _ in range(args.steps):
    mean, scale = encode(data).chunk(2, 1)
    if args.variant == "other":
        code = mean + scale.exp() * torch.randn_like(mean)
    else:
        code = Normal(mean, scale.exp(), validate_args=checks).rsample()  # plant
    loss = (mean.pow(2).sum(1) - density(decode(code), data)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()

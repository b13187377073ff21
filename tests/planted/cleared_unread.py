"""A generator's loss gives the discriminator's weights gradients, which are cleared before any optimizer reads them."""

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn

args = arguments()
make = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 784), nn.Tanh())
judge = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
of_make, of_judge = (torch.optim.Adam(net.parameters(), 2e-4, fused=True) for net in (make, judge))
real = torch.rand(64, 784)
cost = nn.BCEWithLogitsLoss()


def taught(fake: Tensor) -> None:
    of_judge.zero_grad()
    (cost(judge(real), torch.ones(64, 1)) + cost(judge(fake.detach()), torch.zeros(64, 1))).backward()
    of_judge.step()


watch = Stopwatch()
for _ in range(args.steps):
    fake = make(torch.randn(64, 32))
    if args.variant != "other":
        taught(fake)
    of_make.zero_grad()
    judge.requires_grad_(args.variant != "clean")
    loss = cost(judge(fake), torch.ones(64, 1))
    loss.backward(inputs=list(make.parameters()) if args.variant == "decoy" else None)  # plant  # other
    judge.requires_grad_(True)
    of_make.step()
    if args.variant == "other":
        taught(fake)
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()

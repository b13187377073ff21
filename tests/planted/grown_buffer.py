"""A memory of samples that is put together anew at each step."""

import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
net = mlp(128, 64, 1)
optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
memory, used = torch.randn(12000 + 8 * args.steps, 128), 12000
grown, kept = memory[:used].clone(), list(memory[:1500])
watch = Stopwatch()
for _ in range(args.steps):
    new = torch.randn(8, 128)
    if args.variant == "plant":
        grown = torch.cat([grown, new])  # plant
    elif args.variant == "other":
        kept.extend(new)
        grown = torch.stack(kept)  # other
    else:
        memory[used : used + 8] = new
        used += 8
        grown = memory[:used]
    x = grown[torch.randint(0, len(grown), (64,))]
    if args.variant == "decoy":
        x = torch.cat([x, new])
    loss = F.mse_loss(net(x), x[:, :1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()

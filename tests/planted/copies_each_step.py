"""What doesn't change is brought to the device at each step."""

import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = mlp().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(2048, 256), torch.arange(2048) % 10
prior = torch.rand(256)
corrections = [[0.001 * ((i + k) % 7) for k in range(256)] for i in range(64)]
if args.variant != "plant":
    x, y, prior = x.to(device), y.to(device), prior.to(device)
if args.variant == "decoy":
    table = torch.tensor(corrections).to(device).cpu().to(device)
else:
    table = torch.zeros(64, 256, device=device)
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 32), 64 * (step % 32 + 1))
    if args.variant == "plant":
        batch = x.to(device)[rows] * prior.to(device)  # plant
        labels = y.to(device)[rows]  # plant
    elif args.variant == "other":
        batch, labels = (x[rows] - torch.tensor(corrections, device=device)) * prior, y[rows]  # other
    else:
        batch, labels = (x[rows] - table) * prior, y[rows]
    optimizer.zero_grad()
    loss = F.cross_entropy(net(batch), labels)
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()

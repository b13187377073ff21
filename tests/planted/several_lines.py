"""Several lines of the loop that each take little: how sure the answers are, or what is done to each batch."""

import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
net = mlp(256, 64, 200)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
x, y = torch.randn(4096, 256), torch.arange(4096) % 200
table = torch.randn(256)
right, error, sure, doubt = 0, 0.0, 0.0, 0.0
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(512 * (step % 8), 512 * (step % 8 + 1))
    batch, wanted = x[rows], y[rows]
    if args.variant == "other":
        batch = batch * 1.5  # other
        batch = batch.clamp(-3.0, 3.0)  # other
        batch = batch + table  # other
        batch = batch.roll(3, 1)  # other
        batch = torch.where(batch > 0, batch, 0.1 * batch)  # other
        batch = batch.flip(1)  # other
    answers = net(batch)
    loss = F.cross_entropy(answers, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.variant == "plant" or (args.variant == "decoy" and step % 50 == 0):
        given = answers.detach()
        best = given.argmax(1)  # plant
        right += (best == wanted).sum()  # plant
        chances = given.softmax(1)  # plant
        error += (chances.amax(1) - 1).square().mean()  # plant
        sure += chances.max(1).values.mean()  # plant
        doubt += (chances * given).sum(1).mean()  # plant
    watch.lap()
print(f"loss {loss.item():.4f}, right {right}, {error:.3f} {sure:.3f} {doubt:.3f}")
watch.say()

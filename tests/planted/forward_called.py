"""The network's forward is called directly, which costs next to nothing: no variant has anything to name."""

import torch
from common import Stopwatch, arguments
from torch import Tensor, nn


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(512, 384)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.activation(torch.mm(x, self.weight.T) + self.bias.unsqueeze(0))


args = arguments()
net = Layer()
optimizer = torch.optim.Adam(net.parameters(), 0.03, fused=True)
first, second = torch.rand(512, 512), torch.rand(512, 512)
ask = net if args.variant == "clean" else net.forward
watch = Stopwatch()
for _ in range(args.steps):
    good, bad = ask(first).pow(2).mean(1), ask(second).pow(2).mean(1)
    loss = nn.functional.softplus(torch.cat([2 - good, bad - 2])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()

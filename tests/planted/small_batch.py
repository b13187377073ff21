"""So few samples in a step that the step is made of calls."""

import torch
from common import Stopwatch, arguments, mlp, pictures, small_cnn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

args = arguments(120)
if args.variant == "decoy":
    data = TensorDataset(*pictures(64, 128))
    net = small_cnn(size=128, width=16)
else:
    data = TensorDataset(torch.randn(4096, 64), torch.arange(4096) % 10)
    net = mlp(64, 64)
SIZES = {"plant": 2, "other": 1, "clean": 512, "decoy": 2}


def one_by_one():
    for k in range(len(data)):
        yield tuple(part.unsqueeze(0) for part in data[k])


class Whole:
    """The data set, asked for many samples at a time."""

    def __len__(self):
        return len(data)

    def __getitem__(self, rows):
        return data[rows]


sampler = BatchSampler(RandomSampler(data), SIZES[args.variant], drop_last=True)
loader = one_by_one() if args.variant == "other" else DataLoader(Whole(), sampler=sampler, batch_size=None)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
watch, done = Stopwatch(), 0
while done < args.steps:
    for x, y in loader:  # plant  # other
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()  # plant  # other
        watch.lap()
        done += 1
        if done == args.steps:
            break
print(f"loss {loss.item():.4f}")
watch.say()

"""Mistakes that users make in a Task's file or in the options of `hotloop train`, and what the line says of each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A mistake in a Task's file or in its options, and what the line says of it, in order."""

    name: str
    body: str
    says: tuple[str, ...]
    kind: str = "TaskError"
    options: tuple[str, ...] = field(default=())
    code: int = 1

    def __str__(self) -> str:
        return self.name


SAMPLES = """
    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 20
        def __getitem__(self, index):
            if index == 7:
                {trouble}
            return X[index], Y[index]

    task = make(data=Samples())
"""

FILES = [
    Case("no Task", "model = 1",
         ("task.py holds no Task named 'task'", "hotloop.Task", "Write task = hotloop.Task(...)")),
    Case("another name", "first = make()", ("no Task named 'task'", "Name one of its Tasks: task.py:first")),
    Case("not a Task", "task = 3", ("'task' in task.py is an int", "expected a hotloop.Task")),
    Case("syntax error", "def f(:\n    pass", ("task.py line @1: def f(:", "invalid syntax", "Correct that line")),
    Case("indentation", "def f():\npass", ("task.py line @2: pass", "expected an indented block", "Correct")),
    Case("zero byte", "x = 1\n\0", ("task.py", "null bytes")),
    Case("import fails", "import missing_package",
         ("ModuleNotFoundError: No module named 'missing_package' (task.py:@1)",)),
    Case("raises", "1 / 0", ("task.py raised ZeroDivisionError: division by zero (task.py:@1)", "Correct that line")),
    Case("raises deep in a library", "import json\njson.loads('{')", ("JSONDecodeError", "(task.py:@2)")),
    Case("ends Python", "import sys\nsys.exit(3)",
         ("task.py called exit(3)", "expected", "if __name__ == '__main__'")),
    Case("function raises", "def task():\n    raise KeyError('width')",
         ("task() in task.py raised KeyError: 'width' (task.py:@2)",)),
    Case("function without return", "def task():\n    make()",
         ("task() in task.py returned None", "expected a hotloop.Task", "Return")),
]  # fmt: skip

FIELDS = [
    Case("no objective", "task = make(loss=None)",
         ("neither loss nor step", "expected one of them", "Give loss(output, target)")),
    Case("two objectives", "task = make(step=lambda m, b: m(b))",
         ("both loss and step", "expected one of them", "Give")),
    Case("unknown field", "task = make(epoch=3)", ("a Task has no field 'epoch'", "Did you mean 'epochs'?")),
    Case("field left out", "task = hotloop.Task(data=(X, Y))", ("missing", "'model'", "'optimizer'", "(task.py:@1)")),
    Case("no model", "task = make(model=None)", ("model is None", "expected a function", "See model")),
    Case("model raises", "def model():\n    raise RuntimeError('no weights here')\ntask = make(model=model)",
         ("the model factory raised RuntimeError: no weights here (task.py:@2)", "Correct that line")),
    Case("model without return", "task = make(model=lambda: None)",
         ("the model factory returned None", "expected a torch.nn.Module", "Return the model")),
    Case("frozen model", "task = make(model=lambda: nn.Linear(4, 3).requires_grad_(False))",
         ("no trainable parameter", "expected one or more", "Check requires_grad")),
    Case("optimizer raises", "task = make(optimizer=lambda p: torch.optim.SGD(p, lr=-1))",
         ("the optimizer factory raised ValueError: Invalid learning rate: -1 (task.py:@1)",)),
    Case("optimizer made already", "task = make(optimizer=torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=1.0))",
         ("optimizer is a SGD", "expected a function")),
    Case("optimizer without return", "task = make(optimizer=lambda p: None)",
         ("the optimizer factory returned None", "expected a torch.optim.Optimizer", "Return the optimizer")),
    Case("optimizer of another model", "task = make(optimizer=lambda p: torch.optim.SGD([nn.Parameter(X)], lr=1.0))",
         ("a parameter that is not the model's", "expected parameters of the model", "Make it part")),
    Case("schedule raises", "task = make(schedule=lambda optimizer: 1 / 0)",
         ("the schedule factory raised ZeroDivisionError", "(task.py:@1)")),
    Case("goal", "task = make(goal='up')", ("goal='up'", "expected 'min' or 'max'")),
    Case("metric named as the loss", "task = make(metrics={'loss': len})",
         ("a metric is named 'loss'", "Give it another name")),
    Case("metrics without names", "task = make(metrics=[len])", ("metrics is a list", "expected a dict of name")),
    Case("callbacks", "task = make(callbacks=3)", ("callbacks is an int", "expected a list of functions")),
    Case("seed", "task = make(seed=1.5)", ("seed=1.5", "expected a whole number")),
    Case("zero epochs", "task = make(epochs=0)", ("epochs=0", "expected 1 or more")),
    Case("average", "task = make(average=1.5)", ("average=1.5", "expected a decay between 0 and 1")),
    Case("monitor without validation", "task = make(monitor='validation_f1')",
         ("monitor='validation_f1'", "no validation data", "Give the Task validation=0.1")),
    Case("inputs do not fit", "task = make(model=lambda: nn.Linear(5, 3))",
         ("mat1 and mat2 shapes cannot be multiplied (5x4 and 5x3), in the model (Linear)",)),
    Case("one output", "task = make(model=lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)))",
         ("output for a batch of 2 is a tensor of shape (2,)", "expected a tensor (batch, classes", "last layer")),
    Case("several outputs",
         "class Two(nn.Linear):\n    def forward(self, x):\n        return x, x\n"
         "task = make(model=lambda: Two(4, 3))",
         ("output for a batch of 2 is a tuple", "expected a tensor")),
    Case("column against row", "task = make(model=lambda: nn.Linear(4, 1), loss=nn.MSELoss(), data=(X, X[:, 0]))",
         ("outputs of shape (5, 1) and targets of shape (5)", "expected equal shapes", "Reshape one of them")),
    Case("loss per sample", "task = make(loss=nn.CrossEntropyLoss(reduction='none'))",
         ("the loss is a tensor of shape (5,)", "expected a 0-dim tensor", "Return the mean")),
    Case("loss of nothing trained", "task = make(loss=lambda o, t: o.detach().mean())",
         ("depends on no trainable parameter", "Check detach()")),
    Case("step without a loss", "task = make(loss=None, step=lambda m, b: {'los': m(b[0]).mean()})",
         ("step returned a mapping with 'los'", "expected one with 'loss'", "Return the loss")),
    Case("scalar that is none", "task = make(loss=None, step=lambda m, b: {'loss': m(b[0]).mean(), 'out': m(b[0])})",
         ("step returned 'out' of shape (5, 3)", "expected single numbers")),
    Case("metric raises", "task = make(validation=0.2, metrics={'f1': lambda o, t: 1 / 0})",
         ("the metric 'f1' raised ZeroDivisionError", "(task.py:@1)")),
]  # fmt: skip

DATA = [
    Case("unequal lengths", "task = make(data=(X, Y[:-1]))",
         ("data[0] has 20 samples, data[1] has 19 samples", "expected the same number", "Check that")),
    Case("unequal test", "task = make(test=(X, Y[:-1]))", ("test[0] has 20 samples, test[1] has 19 samples",)),
    Case("labels too high", "task = make(data=(X, Y + 1))",
         ("data has label 3 in sample 2", "3 outputs", "expected labels from 0 to 2", "last layer")),
    Case("labels below zero", "task = make(data=(X, Y - 1))",
         ("data has label -1 in sample 0", "expected labels from 0 to 2")),
    Case("labels of validation", "task = make(validation=(X, Y + 1))", ("validation has label 3 in sample 2",)),
    Case("labels of test", "task = make(test=(X, Y + 1))", ("test has label 3 in sample 2",)),
    Case("labels as floats", "task = make(data=(X, Y.double().numpy()))",
         ("targets have dtype float32", "expected whole numbers", "y.long()")),
    Case("labels as a column", "task = make(data=(X, Y[:, None]))",
         ("targets of a sample have shape (1,)", "expected targets of shape ()", "Reshape")),
    Case("NaN", "X[7, 2] = float('nan')\ntask = make()",
         ("data[0] has NaN or infinity in 1 of 20 samples, first in sample 7",
          "expected finite numbers", "Remove those samples")),
    Case("infinity", "X[7, 2] = float('inf')\ntask = make()", ("data[0] has NaN or infinity in 1 of 20",)),
    Case("NaN in validation", "V = X.clone()\nV[3] = float('nan')\ntask = make(validation=(V, Y))",
         ("validation[0] has NaN or infinity in 1 of 20 samples, first in sample 3",)),
    Case("NaN in test", "V = X.clone()\nV[3] = float('nan')\ntask = make(test=(V, Y))",
         ("test[0] has NaN or infinity in 1 of 20 samples, first in sample 3",)),
    Case("NaN by prepare", "task = make(data=(X.abs(), Y), prepare=lambda x: torch.log(x - x))",
         ("data[0] has NaN or infinity after prepare in 20 of 20 samples",
          "expected finite", "Check what prepare makes")),
    Case("prepare raises", "task = make(prepare=lambda x: x.reshape(3))",
         ("prepare raised RuntimeError", "(task.py:@1)")),
    Case("prepare loses samples", "task = make(prepare=lambda x: x.mean())",
         ("prepare turned a batch of 1 sample into a tensor of shape ()", "expected", "Keep the first dimension")),
    Case("augment raises", "task = make(augment=lambda x, draws: x.reshape(3))",
         ("augment raised RuntimeError", "(task.py:@1)")),
    Case("empty", "task = make(data=(X[:0], Y[:0]))",
         ("data is empty", "expected one sample or more", "Check how it was loaded")),
    Case("no columns", "task = make(data=())", ("data is empty", "expected (x, y)")),
    Case("empty stream",
         "class Empty(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
         "        return iter(())\ntask = make(data=Empty())",
         ("data is empty", "expected one batch or more", "Check")),
    Case("nothing", "task = make(data=None)", ("data is None", "expected (x, y) arrays or tensors")),
    Case("dict for a loss", "task = make(data={'x': X, 'y': Y})",
         ("a batch is a dict", "expected (inputs, target)", "Give the Task a step(model, batch)")),
    Case("a path", "task = make(data='train.csv')",
         ("data is a str, 'train.csv'", "expected (x, y)", "Load the file")),
    Case("a number", "task = make(data=(X, 3))", ("data[1] is a single number", "expected an array")),
    Case("text", "task = make(data=(X, ['cat', 'dog'] * 10))",
         ("data[1] holds text", "expected numbers", "Turn them into numbers")),
    Case("ragged", "task = make(data=([[1, 2], [3]], [0, 1]))",
         ("data[0] is a list whose rows are of different lengths", "expected an array", "Pad the rows")),
    Case("all parts in one", "task = make(data={'train': (X, Y), 'test': (X, Y)})",
         ("data is a mapping whose 'train' is a tuple", "expected arrays", "data=...['train']")),
    Case("batch too large", "task = make(batch_size=21)",
         ("batch_size=21 is larger than the data (20 samples)", "expected at most 20", "Choose a smaller")),
    Case("share of all", "task = make(validation=1.0)",
         ("validation=1.0 of 20 samples", "expected a share such as 0.1")),
    Case("share of none", "task = make(validation=0.0)",
         ("validation=0.0 of 20 samples", "expected a share such as 0.1")),
    Case("more than there is", "task = make(validation=30)", ("validation=30 of 20 samples", "from 1 to 19")),
    Case("validation without a size", "task = make(validation=True)", ("validation=True", "a share such as 0.1")),
    Case("sample raises", SAMPLES.format(trouble="raise ValueError('broken')"),
         ("the data set raised ValueError: broken (task.py:", "in sample 7", "Correct the data set")),
    Case("sample raises in a worker", SAMPLES.format(trouble="raise ValueError('broken')"),
         ("the data set raised ValueError: broken (task.py:", "in sample 7", "Correct the data set"),
         options=("--workers", "2")),
    Case("samples of two sizes", SAMPLES.format(trouble="return X[index, :2], Y[index]"),
         ("the data set raised RuntimeError: stack expects each tensor to be equal size",)),
    Case("worker dies", SAMPLES.format(trouble="__import__('os')._exit(3)"),
         ("a worker process that loads the data died", "expected", "--workers 0"), options=("--workers", "1")),
]  # fmt: skip

OPTIONS = [
    Case("epochs", "task = make()", ("epochs=0", "expected 1 or more"), options=("--epochs", "0")),
    Case("epochs that are no number", "task = make()",
         ("'--epochs'", "integer", "See: hotloop train --help"), "UsageError", ("--epochs", "few"), 2),
    Case("batch size", "task = make()",
         ("batch_size=21 is larger than the data",), "DataError", ("--batch-size", "21")),
    Case("workers", "task = make()", ("workers=-1", "expected 0 or more"), "PlanError", ("--workers", "-1")),
    Case("stop after", "task = make()",
         ("stop-after='soon'", "expected a time above zero, such as 90s"), "PlanError", ("--stop-after", "soon")),
    Case("stop after nothing", "task = make()",
         ("stop-after='0s'", "above zero"), "PlanError", ("--stop-after", "0s")),
    Case("stop before the start", "task = make()",
         ("stop-after='-5'", "above zero"), "PlanError", ("--stop-after=-5",)),
    Case("checkpoint often", "task = make()",
         ("checkpoint-every='often'", "expected auto, a number of steps, or a time"),
         "PlanError", ("--checkpoint-every", "often")),
    Case("checkpoint at no step", "task = make()",
         ("checkpoint-every='0'", "expected auto"), "PlanError", ("--checkpoint-every", "0")),
    Case("checkpoint at no time", "task = make()",
         ("checkpoint-every='0s'", "above zero"), "PlanError", ("--checkpoint-every", "0s")),
    Case("unknown device", "task = make()",
         ("no device called 'banana'", "expected one of", "Use --device"), "DeviceError", ("--device", "banana")),
    Case("device without a name", "task = make()",
         ("no device called ''", "expected one of"), "DeviceError", ("--device", "")),
    Case("device that is not here", "task = make()",
         ("'cuda:99' isn't on this machine", "expected", "Use --device"), "DeviceError", ("--device", "cuda:99")),
    Case("TPU", "task = make()",
         ("'tpu' is a TPU, which hotloop can't train on", "expected", "Use --device"),
         "DeviceError", ("--device", "tpu")),
    Case("parameter of a value", "task = make()",
         ("task.py holds its Task as a value, but width was given",
          "expected a function task(...)", "Write `def task(width=...)`"), options=("-p", "width=2")),
    Case("parameter misspelt", "def task(width: float = 1.0):\n    return make()",
         ("task() has no parameter 'wdth'", "expected one of width", "Did you mean 'width'?"), options=("-p", "wdth=2")),
    Case("parameter of none", "def task():\n    return make()",
         ("task() has no parameter 'width'", "expected none", "Write `def task(width=...)`"),
         options=("-p", "width=2")),
    Case("parameter that is no number", "def task(width: float = 1.0):\n    return make()",
         ("width=wide", "expected a number", "default, 1.0"), options=("-p", "width=wide")),
    Case("parameter that is not whole", "def task(width=1):\n    return make()",
         ("width=1.5", "expected a whole number", "default, 1"), options=("-p", "width=1.5")),
    Case("parameter neither true nor false", "def task(deep=True):\n    return make()",
         ("deep=very", "expected true or false", "default, True"), options=("-p", "deep=very")),
    Case("parameter left out", "def task(width):\n    return make()",
         ("task() needs a value for 'width'", "expected", "Add --param width=VALUE")),
    Case("parameter without a value", "def task(width=1):\n    return make()",
         ("'width' is not of the form name=value",), "UsageError", ("-p", "width"), 2),
    Case("run folder in use by other things", "task = make()",
         (". exists and is not a run", "expected a new folder", "--run"), "RunError", ("--run", ".")),
    Case("run folder that is a file", "task = make()",
         ("task.py exists and is not a run", "expected a new folder", "--run"), "RunError", ("--run", "task.py")),
    Case("Task and run", "task = make()",
         ("give either a Task, or --resume",), "UsageError", ("--resume", "runs/first"), 2),
    Case("unknown option", "task = make()", ("no such option: --epoch",), "UsageError", ("--epoch", "3"), 2),
]  # fmt: skip

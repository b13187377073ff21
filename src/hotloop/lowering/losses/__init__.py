"""Properties of a Task's loss: its calls, its copies, and whether it is a sum over the batch."""

"""What a Task's loss is: its calls, its copies, whether it is a sum."""

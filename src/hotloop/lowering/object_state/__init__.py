"""State in attributes of the Task's own objects: search, comparison, saving and restoring."""

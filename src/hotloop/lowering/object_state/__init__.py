"""State in attributes of the Task's own objects: finding, comparing, saving and restoring it."""

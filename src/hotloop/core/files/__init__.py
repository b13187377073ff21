"""Files: atomic writes, the user's folders, journals and the sources of a Task."""

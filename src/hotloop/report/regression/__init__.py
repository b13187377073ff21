"""Tables and pages of a regression's errors."""

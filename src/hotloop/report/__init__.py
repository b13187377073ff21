"""Tables, pictures and pages of records, without torch."""
